// The page table by itself: a drafter keeps its own pages with it, and tests hold it against their
// reference.
#include "kv/page_table.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "base/check.h"

namespace py = pybind11;

namespace specdec {
namespace {

using Tokens = std::vector<TokenId>;

// PageTable with checked arguments: in C++ its caller is the executor, here it is anybody.
struct BoundPageTable {
  BoundPageTable(int num_pages, int page_size, int slots, int max_pages_per_slot, bool reuse,
                 int hash_bits, std::int64_t window, std::int64_t sink_tokens)
      : num_slots(within("num_slots", slots, 1 << 16)),
        table(within("num_pages", num_pages, 1 << 24), page_size, slots,
              within("max_pages_per_slot", max_pages_per_slot, (1 << 28) / slots), reuse, hash_bits,
              {window, sink_tokens}) {}

  // What a table of such a size takes must fit into memory.
  static int within(const char* name, int value, int most) {
    SPECDEC_REQUIRE(value >= 1, name, " = ", value, ": at least 1");
    SPECDEC_REQUIRE(value <= most, name, " = ", value, ": at most ", most);
    return value;
  }

  int checked(int slot) const {
    SPECDEC_REQUIRE(slot >= 0 && slot < num_slots, "slot = ", slot, ": slots are 0..",
                    num_slots - 1);
    return slot;
  }
  void check_room(int slot, std::int64_t tokens) const {
    checked(slot);
    SPECDEC_REQUIRE(tokens >= 0 && table.pages_for(tokens) <= table.max_pages_per_slot(),
                    "tokens = ", tokens, ": a slot has at most ", table.max_pages_per_slot(),
                    " pages of ", table.page_size(), " tokens");
  }

  // Tokens that the slot's pages hold.
  std::int64_t room(int slot) const {
    return static_cast<std::int64_t>(table.pages(checked(slot)).size()) * table.page_size();
  }

  int num_slots;
  PageTable table;
};

}  // namespace

void register_page_table(py::module_& m) {
  py::class_<BoundPageTable>(m, "PageTable",
                             "Which pages hold the K/V of which slot, and prefix reuse between "
                             "slots; bookkeeping only. See cpp/kv/page_table.h.")
      .def(py::init<int, int, int, int, bool, int, std::int64_t, std::int64_t>(), py::kw_only(),
           py::arg("num_pages"), py::arg("page_size"), py::arg("num_slots"),
           py::arg("max_pages_per_slot"), py::arg("enable_block_reuse") = false,
           py::arg("hash_bits") = 64, py::arg("attention_window") = 0, py::arg("sink_tokens") = 0)
      .def(
          "open",
          [](BoundPageTable& self, int slot, const std::string& cache_salt) {
            SPECDEC_REQUIRE(self.room(slot) == 0 && !self.table.is_open(slot), "slot = ", slot,
                            ": it is in use, release it first");
            self.table.open(slot, cache_salt);
          },
          py::arg("slot"), py::arg("cache_salt") = "",
          "Gives an empty slot its salt; only then it may attach and publish.")
      .def(
          "match",
          [](const BoundPageTable& self, const Tokens& tokens, const std::string& cache_salt) {
            const PageTable::Match match = self.table.match(
                cache_salt, tokens.data(), static_cast<std::int64_t>(tokens.size()));
            return py::make_tuple(match.blocks, match.unused);
          },
          py::arg("tokens"), py::arg("cache_salt") = "",
          "(published full blocks that tokens start with and that can be taken over, how many of "
          "their pages nobody holds)")
      .def(
          "attach",
          [](BoundPageTable& self, int slot, const Tokens& tokens) {
            SPECDEC_REQUIRE(
                self.room(slot) == self.table.shared_tokens(slot) || !self.table.is_open(slot),
                "slot = ", slot, ": it holds pages of its own, blocks are attached before these");
            return self.table.attach(slot, tokens.data(), static_cast<std::int64_t>(tokens.size()));
          },
          py::arg("slot"), py::arg("tokens"),
          "Takes over published blocks of tokens; returns how many.")
      .def(
          "reserve",
          [](BoundPageTable& self, int slot, std::int64_t tokens) {
            self.check_room(slot, tokens);
            return self.table.reserve(slot, tokens);
          },
          py::arg("slot"), py::arg("tokens"),
          "Room for tokens in total; False, and nothing changed, when pages are short.")
      .def(
          "commit",
          [](BoundPageTable& self, int slot, std::int64_t length) {
            self.check_room(slot, length);
            SPECDEC_REQUIRE(length <= self.room(slot) && length >= self.table.shared_tokens(slot),
                            "length = ", length, ": slot ", slot, " has room for ", self.room(slot),
                            " tokens, of which ", self.table.shared_tokens(slot), " are published");
            self.table.commit(slot, length);
          },
          py::arg("slot"), py::arg("length"))
      .def(
          "publish",
          [](BoundPageTable& self, int slot, const Tokens& tokens) {
            const auto count = static_cast<std::int64_t>(tokens.size());
            SPECDEC_REQUIRE(
                count <= self.table.length(self.checked(slot)) || !self.table.is_open(slot),
                "tokens has ", count, " entries: ", self.table.length(slot), " are committed");
            self.table.publish(slot, tokens.data(), count);
          },
          py::arg("slot"), py::arg("tokens"),
          "Publishes the full pages of the committed tokens; the slot's run may change.")
      .def(
          "rewind", [](BoundPageTable& self, int slot) { self.table.rewind(self.checked(slot)); },
          py::arg("slot"), "Returns the pages that the committed tokens do not need.")
      .def(
          "trim",
          [](BoundPageTable& self, int slot, std::int64_t position) {
            SPECDEC_REQUIRE(position >= 0 && position <= self.table.length(self.checked(slot)),
                            "position = ", position, ": slot ", slot, " has ",
                            self.table.length(slot), " committed tokens");
            self.table.trim(slot, position);
          },
          py::arg("slot"), py::arg("position"),
          "Returns the pages that no row from that position on sees.")
      .def(
          "release", [](BoundPageTable& self, int slot) { self.table.release(self.checked(slot)); },
          py::arg("slot"), "Returns all pages of the slot.")
      .def("drop_unused", [](BoundPageTable& self) { return self.table.drop_unused(); })
      .def(
          "pages",
          [](const BoundPageTable& self, int slot) { return self.table.pages(self.checked(slot)); },
          py::arg("slot"), "By block; -1: given back.")
      .def(
          "length",
          [](const BoundPageTable& self, int slot) {
            return self.table.length(self.checked(slot));
          },
          py::arg("slot"))
      .def(
          "shared_tokens",
          [](const BoundPageTable& self, int slot) {
            return self.table.shared_tokens(self.checked(slot));
          },
          py::arg("slot"), "Tokens in published pages: nothing before them may be written.")
      .def_property_readonly("free_pages",
                             [](const BoundPageTable& self) { return self.table.free_pages(); })
      .def_property_readonly("cached_pages",
                             [](const BoundPageTable& self) { return self.table.cached_pages(); })
      .def("stats",
           [](const BoundPageTable& self) {
             const ReuseStats& s = self.table.reuse_stats();
             py::dict d;
             d["attached_pages"] = s.attached_pages;
             d["published_pages"] = s.published_pages;
             d["deduplicated_pages"] = s.deduplicated_pages;
             d["evicted_pages"] = s.evicted_pages;
             return d;
           })
      .def("check_integrity", [](const BoundPageTable& self) { self.table.check_integrity(); });
}

}  // namespace specdec
