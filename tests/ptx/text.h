// PTX as text: what nvcc emits, read into functions, variables and statements. Nothing here knows
// what an instruction does (program.h).
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace ptx {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Register classes by what they hold: a predicate, 16, 32 or 64 bits.
enum class Width : std::uint8_t { predicate, half, word, wide };
constexpr unsigned bytes_of(Width w) { return w == Width::predicate ? 0 : 1u << unsigned(w); }

enum class Space : std::uint8_t { generic, global, shared, local, param };

struct Variable {
  std::string name;
  Space space;
  unsigned align = 1, element = 1;  // bytes
  std::uint64_t bytes = 0;          // 0: as large as the launch says (dynamic shared memory)
  bool is_extern = false;
};

struct Operand {
  enum Kind : std::uint8_t {
    reg,      // `number` is the register
    special,  // %tid.x and the like, by `name`
    integer,  // bits in `number`
    real32,   // bits in `number`
    real64,   // bits in `number`
    symbol,   // a variable, a parameter, a function or a label, by `name`
    sink,     // _
    memory,   // [items[0] + number], further items are coordinates
    vector,   // {items}
    pair,     // items[0]|items[1]
    list,     // (items), of calls
  } kind;
  std::string name = {};
  std::uint64_t number = 0;
  bool negated = false;  // !%p
  std::vector<Operand> items = {};
};

struct Statement {
  std::string name;  // the instruction with all its modifiers
  int line;          // of the module's text
  int guard = -1;    // predicate register
  bool guard_negated = false;
  std::vector<Operand> operands = {};
};

struct Function {
  std::string name;
  bool is_entry = false;
  unsigned max_threads = 0;          // .maxntid; 0: not given
  std::vector<Variable> parameters;  // in .param
  std::vector<Variable> results;
  std::vector<Width> registers;
  std::vector<Variable> variables;  // .local, .shared and .param of the body
  std::vector<Statement> body;
  std::map<std::string, std::size_t> labels;  // statement that follows
};

struct Module {
  int target = 0;  // 80, 90
  std::map<std::string, Function> functions;
  std::map<std::string, Variable> variables;
  std::vector<std::string> lines;  // for messages
};

// Throws Error with the line for text that it does not know.
std::unique_ptr<Module> parse(std::string_view text);

}  // namespace ptx
