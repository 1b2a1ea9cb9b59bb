// Which published page holds the K/V of which block of tokens, after which other blocks.
//
// A radix tree whose edges are whole blocks (page_size tokens). A node is a page, so nothing is
// allocated per node; its parent is the page of the block before it, or the root of a salt. A
// salt's tree is reached through its root alone: equal tokens under another salt are another tree.
//
// A child is found by a hash of (parent, tokens), and then both are compared: two blocks are never
// taken for each other, whatever they hash to. Nodes that nobody uses stand in a list, longest
// unused first; what the owner of the tree guarantees (a used node's parent is used) makes every
// node of that list come before its parent, so the oldest is always a leaf.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/types.h"

namespace specdec {

class PrefixIndex {
 public:
  // A page, or the root of a salt (below kNone).
  using Node = std::int32_t;
  static constexpr Node kNone = -1;

  // `hash_bits`: 64; tests take fewer, so that blocks collide.
  PrefixIndex(int num_pages, int page_size, int hash_bits);

  // The root of a salt lives while it has children or is held.
  Node find_root(const std::string& salt) const;
  Node hold_root(const std::string& salt);
  void release_root(Node root);

  // The page that holds `block` after `parent`, or kNone.
  Node find(Node parent, const TokenId* block) const;
  void insert(Node parent, const TokenId* block, std::int32_t page);
  // `page` is a leaf and stands in the list of unused pages.
  void erase(std::int32_t page);

  bool contains(std::int32_t page) const { return nodes_[page].parent != kNone; }
  Node parent(std::int32_t page) const { return nodes_[page].parent; }
  const TokenId* block(std::int32_t page) const {
    return tokens_.data() + static_cast<std::size_t>(page) * page_size_;
  }
  bool is_root(Node node) const { return node < kNone; }

  // The list of unused pages, longest unused first.
  void add_unused(std::int32_t page);
  void remove_unused(std::int32_t page);
  std::int32_t longest_unused() const { return oldest_; }
  int num_unused() const { return num_unused_; }

  std::size_t memory_bytes() const;
  // Throws std::logic_error when links, counts or the list's order do not hold. O(pages).
  void check_integrity() const;

 private:
  struct NodeState {
    Node parent = kNone;  // kNone: not published
    std::int32_t num_children = 0;
    std::int32_t next_in_bucket = kNone;
    std::int32_t older = kNone, newer = kNone;  // in the list of unused pages
    bool unused = false;
  };
  struct Root {
    std::string salt;
    std::int32_t uses = 0;  // children and holders; 0: the entry is free
  };

  std::size_t bucket_of(Node parent, const TokenId* block) const;
  std::int32_t& uses_of(Node node);
  Root& root_at(Node root) { return roots_[static_cast<std::size_t>(-2 - root)]; }

  int page_size_;
  std::uint64_t hash_mask_, hash_key_;
  std::vector<NodeState> nodes_;       // by page
  std::vector<TokenId> tokens_;        // [pages, page_size]
  std::vector<std::int32_t> buckets_;  // first page of a chain
  std::vector<Root> roots_;
  std::vector<Node> free_roots_;
  std::unordered_map<std::string, Node> root_of_salt_;
  std::int32_t oldest_ = kNone, newest_ = kNone;
  int num_unused_ = 0;
};

}  // namespace specdec
