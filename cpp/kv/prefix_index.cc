#include "kv/prefix_index.h"

#include <algorithm>
#include <random>

#include "base/check.h"

namespace specdec {
namespace {

// Finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014).
std::uint64_t mix(std::uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

std::size_t power_of_two_from(std::size_t count) {
  std::size_t size = 1;
  while (size < count) size *= 2;
  return size;
}

}  // namespace

PrefixIndex::PrefixIndex(int num_pages, int page_size, int hash_bits)
    : page_size_(page_size),
      hash_mask_(hash_bits >= 64 ? ~0ull : (1ull << std::max(0, hash_bits)) - 1),
      nodes_(num_pages),
      tokens_(static_cast<std::size_t>(num_pages) * page_size),
      buckets_(power_of_two_from(num_pages), kNone) {
  // Long chains cannot be prepared from outside; results do not depend on the key.
  std::random_device device;
  hash_key_ = (static_cast<std::uint64_t>(device()) << 32) | device();
}

std::size_t PrefixIndex::bucket_of(Node parent, const TokenId* block) const {
  std::uint64_t hash = mix(hash_key_ + static_cast<std::uint32_t>(parent));
  for (int i = 0; i < page_size_; ++i) {
    hash = mix(hash + 0x9e3779b97f4a7c15ull + static_cast<std::uint32_t>(block[i]));
  }
  return static_cast<std::size_t>(hash & hash_mask_) & (buckets_.size() - 1);
}

PrefixIndex::Node PrefixIndex::find_root(const std::string& salt) const {
  const auto it = root_of_salt_.find(salt);
  return it == root_of_salt_.end() ? kNone : it->second;
}

PrefixIndex::Node PrefixIndex::hold_root(const std::string& salt) {
  Node root = find_root(salt);
  if (root == kNone) {
    if (free_roots_.empty()) {
      free_roots_.push_back(-2 - static_cast<Node>(roots_.size()));
      roots_.emplace_back();
    }
    root = free_roots_.back();
    free_roots_.pop_back();
    root_at(root).salt = salt;
    root_of_salt_.emplace(salt, root);
  }
  ++root_at(root).uses;
  return root;
}

void PrefixIndex::release_root(Node root) {
  Root& entry = root_at(root);
  SPECDEC_ENSURE(entry.uses > 0, "a root that nobody holds was released");
  if (--entry.uses > 0) return;
  root_of_salt_.erase(entry.salt);
  entry.salt.clear();
  free_roots_.push_back(root);
}

std::int32_t& PrefixIndex::uses_of(Node node) {
  return is_root(node) ? root_at(node).uses : nodes_[node].num_children;
}

PrefixIndex::Node PrefixIndex::find(Node parent, const TokenId* wanted) const {
  Node page = buckets_[bucket_of(parent, wanted)];
  while (page != kNone &&
         !(nodes_[page].parent == parent && std::equal(wanted, wanted + page_size_, block(page)))) {
    page = nodes_[page].next_in_bucket;
  }
  return page;
}

void PrefixIndex::insert(Node parent, const TokenId* block, std::int32_t page) {
  SPECDEC_ENSURE(!contains(page), "page ", page, " is published already");
  SPECDEC_ENSURE(is_root(parent) || contains(parent), "page ", page, " has parent ", parent,
                 ", which is not published");
  NodeState& node = nodes_[page];
  std::copy(block, block + page_size_,
            tokens_.begin() + static_cast<std::ptrdiff_t>(page) * page_size_);
  std::int32_t& bucket = buckets_[bucket_of(parent, block)];
  node.parent = parent;
  node.num_children = 0;
  node.next_in_bucket = bucket;
  bucket = page;
  ++uses_of(parent);
}

void PrefixIndex::erase(std::int32_t page) {
  NodeState& node = nodes_[page];
  SPECDEC_ENSURE(contains(page) && node.unused && node.num_children == 0, "page ", page,
                 " is not an unused leaf");
  remove_unused(page);
  std::int32_t* link = &buckets_[bucket_of(node.parent, block(page))];
  while (*link != page) link = &nodes_[*link].next_in_bucket;
  *link = node.next_in_bucket;
  const Node parent = node.parent;
  node.parent = node.next_in_bucket = kNone;
  if (is_root(parent)) {
    release_root(parent);
  } else {
    --nodes_[parent].num_children;
  }
}

void PrefixIndex::add_unused(std::int32_t page) {
  NodeState& node = nodes_[page];
  node.unused = true;
  node.older = newest_;
  node.newer = kNone;
  (newest_ == kNone ? oldest_ : nodes_[newest_].newer) = page;
  newest_ = page;
  ++num_unused_;
}

void PrefixIndex::remove_unused(std::int32_t page) {
  NodeState& node = nodes_[page];
  (node.older == kNone ? oldest_ : nodes_[node.older].newer) = node.newer;
  (node.newer == kNone ? newest_ : nodes_[node.newer].older) = node.older;
  node.older = node.newer = kNone;
  node.unused = false;
  --num_unused_;
}

std::size_t PrefixIndex::memory_bytes() const {
  return nodes_.capacity() * sizeof(NodeState) + tokens_.capacity() * sizeof(TokenId) +
         buckets_.capacity() * sizeof(std::int32_t) + roots_.capacity() * sizeof(Root);
}

void PrefixIndex::check_integrity() const {
  std::vector<std::int32_t> children(nodes_.size(), 0), reached(nodes_.size(), 0);
  std::vector<std::int32_t> root_children(roots_.size(), 0);
  for (std::size_t page = 0; page < nodes_.size(); ++page) {
    const NodeState& node = nodes_[page];
    if (node.parent == kNone) {
      SPECDEC_ENSURE(!node.unused, "page ", page, " is not published but listed as unused");
      continue;
    }
    const Node self = static_cast<Node>(page);
    SPECDEC_ENSURE(find(node.parent, block(self)) == self, "page ", page,
                   " is not found by its own tokens");
    if (is_root(node.parent)) {
      ++root_children[static_cast<std::size_t>(-2 - node.parent)];
    } else {
      SPECDEC_ENSURE(contains(node.parent), "page ", page, " has parent ", node.parent,
                     ", which is not published");
      SPECDEC_ENSURE(node.unused || !nodes_[node.parent].unused, "page ", page,
                     " is used, its parent ", node.parent, " is not");
      ++children[node.parent];
    }
  }
  for (std::size_t page = 0; page < nodes_.size(); ++page) {
    SPECDEC_ENSURE(nodes_[page].num_children == children[page], "page ", page, " counts ",
                   nodes_[page].num_children, " children, has ", children[page]);
  }
  for (std::size_t i = 0; i < roots_.size(); ++i) {
    SPECDEC_ENSURE(roots_[i].uses >= root_children[i], "root ", i, " counts ", roots_[i].uses,
                   " uses, has ", root_children[i], " children");
    const bool known = find_root(roots_[i].salt) == -2 - static_cast<Node>(i);
    SPECDEC_ENSURE(roots_[i].uses == 0 || known, "root ", i, " is not found by its salt");
  }
  int listed = 0;
  for (std::int32_t page = oldest_; page != kNone; page = nodes_[page].newer) {
    SPECDEC_ENSURE(nodes_[page].unused && contains(page), "page ", page, " is wrongly listed");
    ++listed;
    reached[page] = listed;
  }
  SPECDEC_ENSURE(listed == num_unused_, "the list holds ", listed, " pages, counts ", num_unused_);
  for (std::size_t page = 0; page < nodes_.size(); ++page) {
    const NodeState& node = nodes_[page];
    if (!node.unused || is_root(node.parent) || !nodes_[node.parent].unused) continue;
    SPECDEC_ENSURE(reached[page] < reached[node.parent], "page ", page,
                   " is listed behind its parent ", node.parent);
  }
}

}  // namespace specdec
