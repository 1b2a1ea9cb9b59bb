#include <cstring>

#include "ptx/program.h"

namespace ptx {
namespace {

unsigned aligned(unsigned n, unsigned to) { return (n + to - 1) / to * to; }
bool is_special(const std::string& name) {
  static const char* const known[] = {"%tid.x",    "%tid.y",    "%tid.z",   "%ntid.x",  "%ntid.y",
                                      "%ntid.z",   "%ctaid.x",  "%ctaid.y", "%ctaid.z", "%nctaid.x",
                                      "%nctaid.y", "%nctaid.z", "%laneid"};
  for (const char* one : known) {
    if (name == one) return true;
  }
  return false;
}

class Linker {
 public:
  Linker(const Module& module, unsigned shared_base) : module_(module), shared_(shared_base) {
    p_.module = &module;
  }

  std::unique_ptr<Program> run(const std::string& kernel) {
    const auto found = module_.functions.find(kernel);
    if (found == module_.functions.end()) throw Error("PTX: no kernel " + kernel);
    p_.entry = &found->second;
    unsigned bytes = 0;
    for (const Variable& v : p_.entry->parameters) {
      bytes = aligned(bytes, v.align);
      parameters_[v.name] = bytes;
      p_.parameter_slots.push_back({bytes, unsigned(v.bytes)});
      bytes += unsigned(v.bytes);
    }
    // A tensor map among them has to lie at a multiple of 64 bytes.
    p_.parameters.assign(bytes + 128, 0);
    p_.parameter_base = (reinterpret_cast<std::uintptr_t>(p_.parameters.data()) + 63) / 64 * 64;
    const unsigned base = shared_;
    place_shared();
    function(found->second);
    for (const auto& [call, name] : unresolved_) p_.calls[call].target = starts_.at(name);
    p_.local_bytes = aligned(p_.local_bytes, 16);
    p_.shared_bytes = shared_ - base;
    for (const auto& [name, v] : module_.variables) {
      if (v.bytes == 0) shared_ = aligned(shared_, v.align);
    }
    p_.dynamic_at = shared_;
    for (const auto& [name, place] : dynamic_) set_constant(place, p_.dynamic_at);
    return std::make_unique<Program>(std::move(p_));
  }

 private:
  struct Scope {  // of a function
    const Function* function;
    std::vector<std::uint32_t> places;
    std::map<std::string, unsigned> local;  // variables and parameters in a lane's local memory
    std::uint32_t start;
  };

  [[noreturn]] void fail(const Statement& s, const std::string& what) const {
    const auto line = std::size_t(s.line - 1);
    throw Error("PTX, line " + std::to_string(s.line) + ", " + scope_->function->name + ": " +
                what + ": " + (line < module_.lines.size() ? module_.lines[line] : s.name));
  }

  void place_shared() {
    for (const auto& [name, v] : module_.variables) {
      if (v.bytes == 0) continue;
      shared_ = aligned(shared_, v.align);
      shared_at_[name] = shared_;
      shared_ += unsigned(v.bytes);
    }
  }
  unsigned in_local(const Variable& v) {
    p_.local_bytes = aligned(p_.local_bytes, std::max(v.align, 8u));
    const unsigned at = p_.local_bytes;
    p_.local_bytes += unsigned(v.bytes);
    return at;
  }

  void function(const Function& f) {
    Scope scope{
        &f, std::vector<std::uint32_t>(f.registers.size(), 0), {}, std::uint32_t(p_.code.size())};
    starts_[f.name] = scope.start;
    for (const Variable& v : f.variables) {
      if (v.space == Space::shared) {
        shared_ = aligned(shared_, v.align);
        shared_at_[v.name] = shared_;
        shared_ += unsigned(v.bytes);
      } else {
        scope.local[v.name] = in_local(v);
      }
    }
    auto& interface = interfaces_[f.name];
    if (!f.is_entry) {
      for (const Variable& v : f.parameters) {
        interface.arguments.push_back({scope.local[v.name] = in_local(v), unsigned(v.bytes)});
      }
      for (const Variable& v : f.results) {
        interface.results.push_back({scope.local[v.name] = in_local(v), unsigned(v.bytes)});
      }
    }
    Scope* const outer = scope_;
    scope_ = &scope;
    std::vector<const Function*> callees;
    for (const Statement& s : f.body) {
      if (s.name == "call.uni" || s.name == "call") callees.push_back(callee(s));
      p_.code.push_back(lower(s));
    }
    // A label behind the last statement, or a function that runs off its end.
    static const Statement end{.name = "ret", .line = 0};
    p_.code.push_back(lower(end));
    for (const Function* other : callees) {
      if (!starts_.count(other->name)) function(*other);
    }
    // The places of parameters are known now.
    std::size_t at = scope.start;
    for (const Statement& s : f.body) {
      Op& op = p_.code[at++];
      if (op.call >= 0) complete_call(s, p_.calls[std::size_t(op.call)]);
    }
    scope_ = outer;
  }

  const Function* callee(const Statement& s) const {
    const std::size_t at = s.operands.size() > 1 && s.operands[0].kind == Operand::list;
    const auto found = module_.functions.find(s.operands.at(at).name);
    if (found == module_.functions.end()) fail(s, "no such function");
    return &found->second;
  }
  void complete_call(const Statement& s, Call& call) {
    const Function* f = callee(s);
    unresolved_.emplace_back(&call - p_.calls.data(), f->name);
    const std::size_t name_at = s.operands[0].kind == Operand::list;
    const auto& interface = interfaces_.at(f->name);
    const auto copies = [&](const Operand& list, const std::vector<Slot>& slots, bool in) {
      std::vector<CopyParameter> found;
      if (list.items.size() != slots.size()) fail(s, "wrong number of parameters");
      for (std::size_t i = 0; i < slots.size(); i++) {
        const unsigned mine = scope_->local.at(list.items[i].name);
        found.push_back({in ? slots[i].at : mine, in ? mine : slots[i].at, slots[i].bytes});
      }
      return found;
    };
    if (name_at) call.results = copies(s.operands[0], interface.results, false);
    if (s.operands.size() > name_at + 1) {
      call.arguments = copies(s.operands[name_at + 1], interface.arguments, true);
    }
  }

  std::uint32_t new_place(Width w) {
    const std::uint32_t at = p_.frame_bytes;
    p_.frame_bytes += place_bytes(w);
    return at;
  }
  std::uint32_t register_place(std::uint64_t number) {
    std::uint32_t& place = scope_->places.at(number);
    if (place == 0) place = new_place(scope_->function->registers[number]);
    return place;
  }
  void set_constant(std::uint32_t place, std::uint64_t bits) {
    for (auto& [at, content] : p_.constants) {
      if (at != place) continue;
      const unsigned size = unsigned(content.size()) / 32;
      for (unsigned l = 0; l < 32; l++) memcpy(content.data() + l * size, &bits, size);
    }
  }
  std::uint32_t constant(Width w, std::uint64_t bits) {
    const auto [known, is_new] = known_constants_.try_emplace({w, bits}, 0);
    if (!is_new) return known->second;
    const std::uint32_t at = known->second = new_place(w);
    if (w == Width::predicate) {
      const std::uint32_t mask = bits ? ~0u : 0;
      p_.constants.push_back({at, std::vector<char>(4)});
      memcpy(p_.constants.back().second.data(), &mask, 4);
    } else {
      p_.constants.push_back({at, std::vector<char>(place_bytes(w))});
      set_constant(at, bits);
    }
    return at;
  }
  std::uint32_t symbol(const Statement& s, const std::string& name, Width w) {
    if (const auto at = shared_at_.find(name); at != shared_at_.end()) {
      return constant(w, at->second);
    }
    if (const auto at = scope_->local.find(name); at != scope_->local.end()) {
      return constant(w, at->second);
    }
    if (const auto at = parameters_.find(name); at != parameters_.end()) {
      if (w != Width::wide) fail(s, "the address of a parameter in 32 bits");
      return constant(w, p_.parameter_base + at->second);
    }
    const auto v = module_.variables.find(name);
    if (v == module_.variables.end()) fail(s, "unknown name " + name);
    auto& place = dynamic_[name + char('0' + int(w))];
    if (place == 0) {
      place = new_place(w);
      p_.constants.push_back({place, std::vector<char>(place_bytes(w))});
    }
    return place;
  }

  // Vectors spread out; a memory operand gives its base, then its coordinates.
  static void spread(const Operand& o, std::vector<const Operand*>& out) {
    if (o.kind == Operand::vector || o.kind == Operand::pair || o.kind == Operand::list) {
      for (const Operand& item : o.items) spread(item, out);
    } else {
      out.push_back(&o);
      if (o.kind != Operand::memory) return;
      for (std::size_t i = 1; i < o.items.size(); i++) spread(o.items[i], out);
    }
  }

  std::string opcode_name(const Statement& s) const {
    std::string name = s.name;
    // Parameters of functions and of calls lie in a lane's local memory.
    if (name.rfind("ld.param", 0) == 0 || name.rfind("st.param", 0) == 0) {
      for (const Operand& o : s.operands) {
        if (o.kind == Operand::memory && scope_->local.count(o.items[0].name)) {
          name.replace(2, 6, ".local");
        }
      }
    }
    if (name.rfind("bar.", 0) == 0 && s.operands.size() == 2) name += " 2";
    if (name.rfind("shfl.", 0) == 0 && s.operands[0].kind != Operand::pair) name += " 5";
    if (name.rfind("wgmma.mma_async", 0) == 0 && s.operands.at(1).kind == Operand::vector) {
      name += " registers";
    }
    if (name.rfind("mov.", 0) == 0 && s.operands.size() == 2) {
      if (s.operands[0].kind == Operand::vector) {
        name += " unpack" + std::to_string(s.operands[0].items.size());
      } else if (s.operands[1].kind == Operand::vector) {
        name += " pack" + std::to_string(s.operands[1].items.size());
      }
    }
    return name;
  }

  Op lower(const Statement& s) {
    const Opcode* opcode = find_opcode(opcode_name(s));
    if (opcode == nullptr) fail(s, "unknown instruction " + s.name);
    Op op{.run = opcode->run, .statement = &s, .x = {}, .widths = {}};
    op.always = opcode->always, op.detail = opcode->detail;
    if (s.guard >= 0) {
      if (scope_->function->registers.at(std::size_t(s.guard)) != Width::predicate) {
        fail(s, "the guard is no predicate");
      }
      op.guarded = true, op.guard_negated = s.guard_negated;
      op.guard = register_place(std::uint64_t(s.guard));
    }
    if (opcode->signature == "call") {
      op.call = int(p_.calls.size());
      p_.calls.emplace_back();
      return op;
    }
    std::vector<const Operand*> operands;
    for (const Operand& o : s.operands) spread(o, operands);
    if (operands.size() != opcode->signature.size()) {
      fail(s, "takes " + std::to_string(opcode->signature.size()) + " operands, not " +
                  std::to_string(operands.size()));
    }
    unsigned constants = 0, addresses = 0;
    for (std::size_t i = 0; i < operands.size(); i++) {
      const Operand& o = *operands[i];
      const char want = opcode->signature[i];
      if (want == 'L') {
        const auto label = scope_->function->labels.find(o.name);
        if (label == scope_->function->labels.end()) fail(s, "no label " + o.name);
        op.target = scope_->start + std::uint32_t(label->second);
      } else if (want == 'n') {
        if (o.kind != Operand::integer) fail(s, "wants a constant");
        op.constants[constants++] = o.number;
      } else if (want == 'm') {
        if (o.kind != Operand::memory) fail(s, "wants an address");
        op.disp[addresses++] = o.number;
        add(op, s, o.items[0], o.items[0].kind == Operand::reg ? 'a' : 'x', 8);
      } else {
        if (o.negated) op.negated |= std::uint64_t{1} << i;
        add(op, s, o, want, opcode->width);
      }
    }
    return op;
  }

  void add(Op& op, const Statement& s, const Operand& o, char want, unsigned default_bytes) {
    Width w = want == 'p'          ? Width::predicate
              : want == 'h'        ? Width::half
              : want == 'w'        ? Width::word
              : want == 'x'        ? Width::wide
              : default_bytes == 8 ? Width::wide
              : default_bytes == 4 ? Width::word
                                   : Width::half;
    std::uint32_t place = 0;
    switch (o.kind) {
      case Operand::reg: {
        const Width is = scope_->function->registers.at(o.number);
        const bool fits = want == 'v'   ? is != Width::predicate
                          : want == 'a' ? is == Width::word || is == Width::wide
                                        : is == w;
        if (!fits) fail(s, "register " + o.name + " is of another size");
        place = register_place(o.number), w = is;
        break;
      }
      case Operand::special: {
        if (!is_special(o.name) || w != Width::word) fail(s, "unknown register " + o.name);
        std::uint32_t& at = p_.specials[o.name];
        if (at == 0) at = new_place(Width::word);
        place = at;
        break;
      }
      case Operand::integer:
        place = constant(w, o.number);
        break;
      case Operand::real32:
        if (w != Width::word) fail(s, "a 32-bit constant does not fit");
        place = constant(w, o.number);
        break;
      case Operand::real64:
        if (w != Width::wide) fail(s, "a 64-bit constant does not fit");
        place = constant(w, o.number);
        break;
      case Operand::symbol:
        place = symbol(s, o.name, w);
        break;
      case Operand::sink:
        place = kTrash;
        break;
      default:
        fail(s, "an operand that is not understood");
    }
    op.x.push_back(place);
    op.widths.push_back(w);
  }

  struct Slot {
    unsigned at, bytes;
  };
  struct Interface {
    std::vector<Slot> arguments, results;
  };
  const Module& module_;
  Program p_;
  Scope* scope_ = nullptr;
  unsigned shared_;
  std::map<std::string, unsigned> shared_at_, parameters_;
  std::map<std::string, std::uint32_t> dynamic_, starts_;
  std::map<std::string, Interface> interfaces_;
  std::map<std::pair<Width, std::uint64_t>, std::uint32_t> known_constants_;
  std::vector<std::pair<std::size_t, std::string>> unresolved_;
};

}  // namespace

std::unique_ptr<Program> link(const Module& module, const std::string& kernel,
                              unsigned shared_base) {
  return Linker(module, shared_base).run(kernel);
}

std::string Program::where(const Op& op) const {
  const auto line = std::size_t(op.statement->line - 1);
  std::string text = line < module->lines.size() ? module->lines[line] : op.statement->name;
  text.erase(0, text.find_first_not_of(" \t"));
  if (text.size() > 160) text = text.substr(0, 160) + "...";
  return "line " + std::to_string(op.statement->line) + " of its PTX, " + text;
}

}  // namespace ptx
