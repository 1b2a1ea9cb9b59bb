// The packed weights of a decoder, to a file and from one (backend/cpu/decoder/packed_decoder.cc).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "backend/cpu/decoder/llama_decoder.h"
#include "base/check.h"
#include "base/mapped_file.h"
#include "bind/decoder_object.h"
#include "bind/registers.h"

namespace py = pybind11;

namespace specdec {
namespace {

using cpu::PackedPiece;
using cpu::PackedView;
using cpu::WeightType;

// Name, type, n, k, first byte in the file.
using PieceTuple = std::tuple<std::string, std::string, std::int64_t, std::int64_t, std::int64_t>;

constexpr std::int64_t kAlignment = 64;

WeightType type_named(const std::string& name) {
  for (const WeightType type : {WeightType::kF32, WeightType::kF16, WeightType::kBF16}) {
    if (name == weight_type_name(type)) return type;
  }
  return cpu::block_format_named(name);
}

// Bytes of a piece; -1 for what is none.
std::int64_t piece_bytes(WeightType type, std::int64_t n, std::int64_t k) {
  if (k != 0) return cpu::packed_bytes(type, n, k);
  return type == WeightType::kF32 && n >= 1 && n <= INT32_MAX ? n * 4 : -1;
}

py::list packs(const DecoderObject& self) {
  py::list result;
  for (const PackedPiece& piece : self.decoder.packs()) {
    const PackedView& view = piece.view;
    const std::int64_t bytes = piece_bytes(view.type, view.n, view.k);
    result.append(py::make_tuple(piece.name, weight_type_name(view.type), view.n, view.k,
                                 py::memoryview::from_memory(view.data, bytes)));
  }
  return result;
}

void map_packs(DecoderObject& self, int file, const std::string& name,
               const std::vector<PieceTuple>& pieces) {
  const auto mapped = std::make_shared<MappedFile>(file, name);
  const auto size = static_cast<std::int64_t>(mapped->bytes());
  std::vector<PackedPiece> found;
  for (const auto& [piece, type, n, k, offset] : pieces) {
    PackedView view;
    view.type = type_named(type);
    view.n = n;
    view.k = k;
    const std::int64_t bytes = piece_bytes(view.type, n, k);
    SPECDEC_REQUIRE(bytes > 0, piece, ": [", n, ", ", k, "] ", type, " is no weight");
    SPECDEC_REQUIRE(offset >= 0 && offset % kAlignment == 0, piece, ": byte ", offset,
                    ": must be a multiple of ", kAlignment);
    SPECDEC_REQUIRE(bytes <= size && offset <= size - bytes, piece, ": bytes ", offset, " to ",
                    offset + bytes, " are not in the file of ", size, " bytes");
    view.data = mapped->data() + offset;
    view.owner = mapped;
    found.push_back({piece, view});
  }
  const py::gil_scoped_release release;
  mapped->want_huge_pages();
  self.decoder.set_packs(found);
}

}  // namespace

void register_packed_decoder(py::module_& m) {
  m.attr("PACK_LAYOUT") = cpu::kPackLayout;
  m.def("decoder_packs", &packs, py::arg("decoder"),
        "The packed weights of a LlamaDecoder: (name, type, n, k, bytes), k = 0 for vectors. The "
        "bytes are the decoder's own memory: use them while it lives.");
  m.def("map_packs", &map_packs, py::arg("decoder"), py::arg("file"), py::arg("name"),
        py::arg("pieces"),
        "Give a LlamaDecoder all weights but rotary tables where they lie in the open file "
        "``file`` (a descriptor, which may be closed at once): (name, type, n, k, first byte) as "
        "decoder_packs() gave them. Raises ValueError naming the piece; ``name`` is the file's.");
  m.def(
      "packed_bytes",
      [](const std::string& type, std::int64_t n, std::int64_t k) {
        return piece_bytes(type_named(type), n, k);
      },
      py::arg("type"), py::arg("n"), py::arg("k"),
      "Bytes of such a piece of decoder_packs(); -1 for one that cannot be. Raises ValueError for "
      "an unknown type.");
}

}  // namespace specdec
