// A kernel made ready to run: registers have places, names have addresses, and every statement has
// the function that executes it. A statement that no table entry knows is an error here, before
// anything runs.
#pragma once
#include <unordered_map>

#include "ptx/text.h"

namespace ptx {

struct Op;
struct Warp;
using Run = void (*)(Warp&, const Op&);

// How an instruction is executed. `signature` has a letter for each operand, in the order of the
// text, vectors spread out:
//   p h w x  a predicate, 16, 32, 64 bits: a register of exactly that class, or an immediate
//   v        a value whose register may be wider than the type that is named
//   m        an address: its base, to which Op::disp is added
//   n        a constant of the text, in Op::constants
//   L        a label, in Op::target
struct Opcode {
  Run run;
  std::string signature;
  unsigned width = 4;        // of an immediate at a `v`, in bytes
  bool always = false;       // runs although no lane is active: it decides for itself
  std::uint64_t detail = 0;  // for the function: a shape, a mode
};
const Opcode* find_opcode(const std::string& name);

struct CopyParameter {
  unsigned to, from, bytes;  // offsets in a lane's local memory
};
struct Call {
  std::uint32_t target;
  std::vector<CopyParameter> arguments, results;
};

struct Op {
  Run run;
  const Statement* statement;
  std::vector<std::uint32_t> x;  // places of the operands in the warp's frame
  std::vector<Width> widths;     // of those
  std::uint64_t disp[3] = {};    // of each address, in the order of the text
  std::uint64_t constants[8] = {};
  std::uint32_t target = 0;
  std::uint32_t guard = 0;  // place of the predicate
  bool guarded = false, guard_negated = false, always = false;
  std::uint64_t negated = 0;  // bit i: operand i is !p
  std::uint64_t detail = 0;
  int call = -1;  // of Program::calls
};

// Registers start behind the places that every warp has.
enum Place : std::uint32_t { kTrash = 0, kFirstPlace = 256 };

// A register's place holds its value in every lane; a predicate's is one word with a bit for each.
constexpr unsigned place_bytes(Width w) { return w == Width::predicate ? 64 : 32 * bytes_of(w); }

struct Program {
  const Module* module;
  const Function* entry;
  std::vector<Op> code;
  std::vector<Call> calls;
  std::unordered_map<std::string, std::uint32_t> specials;             // name -> place of 32 words
  std::vector<std::pair<std::uint32_t, std::vector<char>>> constants;  // place, content
  unsigned frame_bytes = kFirstPlace;
  unsigned local_bytes = 0;                   // of a lane
  unsigned shared_bytes = 0, dynamic_at = 0;  // static, and where dynamic shared memory begins
  std::vector<char> parameters;               // where ld.param of the kernel reads: from
  std::uintptr_t parameter_base = 0;          // here on
  std::vector<std::pair<unsigned, unsigned>> parameter_slots;  // offset, bytes

  std::string where(const Op& op) const;  // for messages
};

// shared_base: the address at which a block's shared memory begins.
std::unique_ptr<Program> link(const Module& module, const std::string& kernel,
                              unsigned shared_base);

}  // namespace ptx
