// Which published page holds the K/V of which block of tokens, after which other blocks.
//
// A radix tree whose edges are whole blocks (page_size tokens). A node is a block of a text, its
// parent the block before it or the root of a salt. A salt's tree is reached through its root
// alone: equal tokens under another salt are another tree.
//
// A node has a page, or lost it: with an attention window (page_table.h) pages give way out of the
// middle of a text, and what comes behind them can still be of use. Such a node lives as long as
// one below it, or a slot that ends there. Without a window every node has its page.
//
// A child is found by a hash of (parent, tokens), and then both are compared: two blocks are never
// taken for each other, whatever they hash to. Nodes whose page nobody uses stand in a list,
// longest unused first. Without a window, what the owner of the tree guarantees (a used node's
// parent is used) makes every node of that list come before its parent, so the oldest is a leaf.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/types.h"

namespace specdec {

class PrefixIndex {
 public:
  // A block, or the root of a salt (below kNone).
  using Node = std::int32_t;
  static constexpr Node kNone = -1;

  // `hash_bits`: 64; tests take fewer, so that blocks collide.
  PrefixIndex(int num_pages, int page_size, int hash_bits);

  // The root of a salt lives while it has children or is held.
  Node find_root(const std::string& salt) const;
  Node hold_root(const std::string& salt);
  void release_root(Node root);

  // The node of `block` after `parent`, or kNone.
  Node find(Node parent, const TokenId* block) const;
  // page: kNone for a block whose page is gone already; such a node has to be held.
  Node insert(Node parent, const TokenId* block, std::int32_t page);
  void give_page(Node node, std::int32_t page);
  // The page of a node that stands in the list of unused ones; it is not published any more.
  std::int32_t take_page(Node node);
  // A node that is held stays, with or without a page. Roots: nothing.
  void hold(Node node);
  void release(Node node);

  bool contains(std::int32_t page) const { return node_of_page_[page] != kNone; }
  Node node_of(std::int32_t page) const { return node_of_page_[page]; }
  std::int32_t page(Node node) const { return nodes_[node].page; }
  Node parent(Node node) const { return nodes_[node].parent; }
  const TokenId* block(Node node) const {
    return tokens_.data() + static_cast<std::size_t>(node) * page_size_;
  }
  bool is_root(Node node) const { return node < kNone; }
  std::size_t num_nodes() const { return nodes_.size() - free_nodes_.size(); }

  // The list of nodes with unused pages, longest unused first.
  void add_unused(Node node);
  void remove_unused(Node node);
  Node longest_unused() const { return oldest_; }
  int num_unused() const { return num_unused_; }

  std::size_t memory_bytes() const;
  // Throws std::logic_error when links or counts do not hold; `whole`: or a page is missing, or the
  // list's order. O(nodes).
  void check_integrity(bool whole) const;

 private:
  struct NodeState {
    Node parent = kNone;  // kNone: no node
    std::int32_t page = kNone;
    std::int32_t uses = 0;  // children and holders
    std::int32_t next_in_bucket = kNone;
    std::int32_t older = kNone, newer = kNone;  // in the list of unused pages
    bool unused = false;
  };
  struct Root {
    std::string salt;
    std::int32_t uses = 0;  // children and holders; 0: the entry is free
  };

  std::size_t bucket_of(Node parent, const TokenId* block) const;
  Root& root_at(Node root) { return roots_[static_cast<std::size_t>(-2 - root)]; }
  Node new_node();
  void prune(Node node);
  void check_list(bool whole) const;

  int page_size_;
  std::uint64_t hash_mask_, hash_key_;
  std::vector<NodeState> nodes_;
  std::vector<TokenId> tokens_;  // [nodes, page_size]
  std::vector<Node> free_nodes_;
  std::vector<Node> node_of_page_;
  std::vector<std::int32_t> buckets_;  // first node of a chain
  std::vector<Root> roots_;
  std::vector<Node> free_roots_;
  std::unordered_map<std::string, Node> root_of_salt_;
  Node oldest_ = kNone, newest_ = kNone;
  int num_unused_ = 0;
};

}  // namespace specdec
