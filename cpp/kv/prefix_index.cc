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
      node_of_page_(num_pages, kNone),
      buckets_(power_of_two_from(num_pages), kNone) {
  // Without a window a node is a page, so this is all that there will be.
  nodes_.reserve(num_pages);
  tokens_.reserve(static_cast<std::size_t>(num_pages) * page_size);
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

PrefixIndex::Node PrefixIndex::find(Node parent, const TokenId* wanted) const {
  Node node = buckets_[bucket_of(parent, wanted)];
  while (node != kNone &&
         !(nodes_[node].parent == parent && std::equal(wanted, wanted + page_size_, block(node)))) {
    node = nodes_[node].next_in_bucket;
  }
  return node;
}

PrefixIndex::Node PrefixIndex::new_node() {
  if (free_nodes_.empty()) {
    nodes_.emplace_back();
    tokens_.resize(nodes_.size() * page_size_);
    return static_cast<Node>(nodes_.size()) - 1;
  }
  const Node node = free_nodes_.back();
  free_nodes_.pop_back();
  nodes_[node] = {};
  return node;
}

PrefixIndex::Node PrefixIndex::insert(Node parent, const TokenId* block, std::int32_t page) {
  SPECDEC_ENSURE(is_root(parent) || nodes_[parent].parent != kNone, "page ", page, " has parent ",
                 parent, ", which is not published");
  const Node self = new_node();
  NodeState& node = nodes_[self];
  std::copy(block, block + page_size_,
            tokens_.begin() + static_cast<std::ptrdiff_t>(self) * page_size_);
  std::int32_t& bucket = buckets_[bucket_of(parent, block)];
  node.parent = parent;
  node.next_in_bucket = bucket;
  bucket = self;
  ++(is_root(parent) ? root_at(parent).uses : nodes_[parent].uses);
  if (page != kNone) give_page(self, page);
  return self;
}

void PrefixIndex::give_page(Node node, std::int32_t page) {
  SPECDEC_ENSURE(!contains(page), "page ", page, " is published already");
  SPECDEC_ENSURE(nodes_[node].page == kNone, "node ", node, " has page ", nodes_[node].page);
  nodes_[node].page = page;
  node_of_page_[page] = node;
}

std::int32_t PrefixIndex::take_page(Node node) {
  SPECDEC_ENSURE(nodes_[node].unused, "node ", node, " has no unused page");
  remove_unused(node);
  const std::int32_t page = nodes_[node].page;
  nodes_[node].page = node_of_page_[page] = kNone;
  prune(node);
  return page;
}

void PrefixIndex::hold(Node node) {
  if (!is_root(node)) ++nodes_[node].uses;
}

void PrefixIndex::release(Node node) {
  if (is_root(node)) return;
  --nodes_[node].uses;
  prune(node);
}

// Forgets a node that has neither page nor use, and those above it of which that becomes true.
void PrefixIndex::prune(Node node) {
  while (nodes_[node].page == kNone && nodes_[node].uses == 0) {
    const Node parent = nodes_[node].parent;
    std::int32_t* link = &buckets_[bucket_of(parent, block(node))];
    while (*link != node) link = &nodes_[*link].next_in_bucket;
    *link = nodes_[node].next_in_bucket;
    nodes_[node] = {};
    free_nodes_.push_back(node);
    if (is_root(parent)) return release_root(parent);
    --nodes_[parent].uses;
    node = parent;
  }
}

void PrefixIndex::add_unused(Node self) {
  NodeState& node = nodes_[self];
  node.unused = true;
  node.older = newest_;
  node.newer = kNone;
  (newest_ == kNone ? oldest_ : nodes_[newest_].newer) = self;
  newest_ = self;
  ++num_unused_;
}

void PrefixIndex::remove_unused(Node self) {
  NodeState& node = nodes_[self];
  (node.older == kNone ? oldest_ : nodes_[node.older].newer) = node.newer;
  (node.newer == kNone ? newest_ : nodes_[node.newer].older) = node.older;
  node.older = node.newer = kNone;
  node.unused = false;
  --num_unused_;
}

std::size_t PrefixIndex::memory_bytes() const {
  return nodes_.capacity() * sizeof(NodeState) + tokens_.capacity() * sizeof(TokenId) +
         (buckets_.capacity() + node_of_page_.capacity() + free_nodes_.capacity()) *
             sizeof(std::int32_t) +
         roots_.capacity() * sizeof(Root);
}

void PrefixIndex::check_integrity(bool whole) const {
  std::vector<std::int32_t> children(nodes_.size(), 0);
  std::vector<std::int32_t> root_children(roots_.size(), 0);
  std::size_t alive = 0, with_page = 0;
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    const NodeState& node = nodes_[i];
    const Node self = static_cast<Node>(i);
    if (node.parent == kNone) {
      SPECDEC_ENSURE(!node.unused && node.page == kNone, "node ", self, " is none but has page ",
                     node.page);
      continue;
    }
    ++alive;
    with_page += node.page != kNone;
    SPECDEC_ENSURE(find(node.parent, block(self)) == self, "node ", self,
                   " is not found by its own tokens");
    SPECDEC_ENSURE(node.page == kNone || node_of_page_[node.page] == self, "page ", node.page,
                   " is of node ", self, ", and of ", node_of_page_[node.page]);
    SPECDEC_ENSURE(node.page != kNone || (!whole && !node.unused && node.uses > 0), "node ", self,
                   " has no page, ", node.uses, " uses");
    if (is_root(node.parent)) {
      ++root_children[static_cast<std::size_t>(-2 - node.parent)];
      continue;
    }
    const NodeState& parent = nodes_[node.parent];
    SPECDEC_ENSURE(parent.parent != kNone, "node ", self, " has parent ", node.parent,
                   ", which is not published");
    SPECDEC_ENSURE(!whole || node.unused || !parent.unused, "page ", node.page,
                   " is used, its parent ", parent.page, " is not");
    ++children[node.parent];
  }
  SPECDEC_ENSURE(alive == num_nodes(), alive, " nodes, counted ", num_nodes());
  std::size_t pages = 0;
  for (const Node node : node_of_page_) pages += node != kNone;
  SPECDEC_ENSURE(pages == with_page, pages, " pages are published, ", with_page, " nodes have one");
  for (std::size_t node = 0; node < nodes_.size(); ++node) {
    SPECDEC_ENSURE(nodes_[node].uses >= children[node], "node ", node, " counts ",
                   nodes_[node].uses, " uses, has ", children[node], " children");
  }
  for (std::size_t i = 0; i < roots_.size(); ++i) {
    SPECDEC_ENSURE(roots_[i].uses >= root_children[i], "root ", i, " counts ", roots_[i].uses,
                   " uses, has ", root_children[i], " children");
    const bool known = find_root(roots_[i].salt) == -2 - static_cast<Node>(i);
    SPECDEC_ENSURE(roots_[i].uses == 0 || known, "root ", i, " is not found by its salt");
  }
  check_list(whole);
}

void PrefixIndex::check_list(bool whole) const {
  std::vector<std::int32_t> reached(nodes_.size(), 0);
  int listed = 0;
  for (Node node = oldest_; node != kNone; node = nodes_[node].newer) {
    SPECDEC_ENSURE(nodes_[node].unused && nodes_[node].page != kNone, "node ", node,
                   " is wrongly listed");
    reached[node] = ++listed;
  }
  SPECDEC_ENSURE(listed == num_unused_, "the list holds ", listed, " pages, counts ", num_unused_);
  for (std::size_t i = 0; whole && i < nodes_.size(); ++i) {
    const NodeState& node = nodes_[i];
    if (!node.unused || is_root(node.parent) || !nodes_[node.parent].unused) continue;
    SPECDEC_ENSURE(reached[i] < reached[node.parent], "page ", node.page,
                   " is listed behind its parent ", nodes_[node.parent].page);
  }
}

}  // namespace specdec
