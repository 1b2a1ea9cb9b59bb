#include "ptx/text.h"

#include <cstring>

namespace ptx {
namespace {

struct Token {
  enum Kind { word, number, punctuation, text, end } kind = end;
  std::string_view is;
  int line = 0;
};

bool word_char(char c) { return std::isalnum(static_cast<unsigned char>(c)) || strchr("_$%.", c); }

class Lexer {
 public:
  explicit Lexer(std::string_view text) : text_(text) { step(); }
  const Token& now() const { return token_; }
  Token take() {
    const Token t = token_;
    step();
    return t;
  }
  bool at(std::string_view s) const { return token_.kind != Token::text && token_.is == s; }
  bool accept(std::string_view s) {
    if (!at(s)) return false;
    step();
    return true;
  }
  [[noreturn]] void fail(const std::string& what) const {
    throw Error("PTX, line " + std::to_string(token_.line) + ": " + what);
  }
  void expect(std::string_view s) {
    if (!accept(s)) {
      fail("expected '" + std::string(s) + "', got '" + std::string(token_.is) + "'");
    }
  }
  std::string word() {
    if (token_.kind != Token::word) fail("expected a name, got '" + std::string(token_.is) + "'");
    return std::string(take().is);
  }

 private:
  void step() {
    skip_blanks();
    token_.line = line_;
    if (at_ >= text_.size() || text_[at_] == '\0') {
      token_.kind = Token::end, token_.is = {};
      return;
    }
    const std::size_t first = at_;
    const char c = text_[at_];
    if (std::isdigit(static_cast<unsigned char>(c))) {
      while (at_ < text_.size() && std::isalnum(static_cast<unsigned char>(text_[at_]))) ++at_;
      if (at_ < text_.size() && text_[at_] == '.') {  // .version 9.0
        ++at_;
        while (at_ < text_.size() && std::isdigit(static_cast<unsigned char>(text_[at_]))) ++at_;
      }
      token_.kind = Token::number;
    } else if (c && word_char(c)) {
      while (at_ < text_.size()) {  // "::" belongs to a modifier, ":" ends a label
        if (word_char(text_[at_])) {
          ++at_;
        } else if (text_.substr(at_, 2) == "::") {
          at_ += 2;
        } else {
          break;
        }
      }
      token_.kind = Token::word;
    } else if (c == '"') {
      at_ = text_.find('"', at_ + 1) + 1;
      if (at_ == 0) fail("a text without an end");
      token_.kind = Token::text;
    } else {
      ++at_;
      token_.kind = Token::punctuation;
    }
    token_.is = text_.substr(first, at_ - first);
  }
  void skip_blanks() {
    while (at_ < text_.size()) {
      if (text_.substr(at_, 2) == "//") {
        at_ = std::min(text_.find('\n', at_), text_.size());
      } else if (std::isspace(static_cast<unsigned char>(text_[at_]))) {
        line_ += text_[at_++] == '\n';
      } else {
        return;
      }
    }
  }

  std::string_view text_;
  std::size_t at_ = 0;
  int line_ = 1;
  Token token_;
};

struct Type {
  Width width;
  unsigned bytes;
};
Type type_of(const std::string& name, const Lexer& at) {
  static const std::map<std::string, Type> types = {
      {".pred", {Width::predicate, 0}}, {".b8", {Width::half, 1}},  {".u8", {Width::half, 1}},
      {".s8", {Width::half, 1}},        {".b16", {Width::half, 2}}, {".u16", {Width::half, 2}},
      {".s16", {Width::half, 2}},       {".f16", {Width::half, 2}}, {".bf16", {Width::half, 2}},
      {".b32", {Width::word, 4}},       {".u32", {Width::word, 4}}, {".s32", {Width::word, 4}},
      {".f32", {Width::word, 4}},       {".b64", {Width::wide, 8}}, {".u64", {Width::wide, 8}},
      {".s64", {Width::wide, 8}},       {".f64", {Width::wide, 8}},
  };
  const auto found = types.find(name);
  if (found == types.end()) at.fail("unknown type " + name);
  return found->second;
}
std::uint64_t number_of(std::string_view digits) {
  return std::strtoull(std::string(digits).c_str(), nullptr, 0);
}

class Parser {
 public:
  explicit Parser(std::string_view text) : lex_(text) {}

  std::unique_ptr<Module> run() {
    auto module = std::make_unique<Module>();
    while (lex_.now().kind != Token::end) directive(*module);
    return module;
  }

 private:
  void directive(Module& module) {
    bool is_extern = false;
    std::string word = lex_.word();
    while (word == ".visible" || word == ".weak" || word == ".extern") {
      is_extern |= word == ".extern";
      word = lex_.word();
    }
    if (word == ".version" || word == ".address_size") {
      lex_.take();
    } else if (word == ".target") {
      const std::string target = lex_.word();
      if (target.rfind("sm_", 0) != 0) lex_.fail("unknown target " + target);
      module.target = std::stoi(target.substr(3));
    } else if (word == ".entry" || word == ".func") {
      function(module, word == ".entry");
    } else if (word == ".shared") {
      Variable v = variable(Space::shared);
      v.is_extern = is_extern;
      lex_.expect(";");
      module.variables[v.name] = v;
    } else {
      lex_.fail("unknown directive " + word);
    }
  }

  // After the space: .align 8 .b8 name[32]
  Variable variable(Space space) {
    Variable v{.name = {}, .space = space};
    std::string type = lex_.word();
    unsigned align = 0;
    while (type == ".align" || type == ".ptr" || type == ".global") {
      if (type == ".align") align = unsigned(number_of(lex_.take().is));
      type = lex_.word();
    }
    v.element = type_of(type, lex_).bytes;
    v.align = align ? align : v.element;
    v.name = lex_.word();
    v.bytes = v.element;
    if (lex_.accept("[")) {
      v.bytes = lex_.at("]") ? 0 : v.element * number_of(lex_.take().is);
      lex_.expect("]");
    }
    return v;
  }
  std::vector<Variable> parameters() {
    std::vector<Variable> found;
    lex_.expect("(");
    while (!lex_.accept(")")) {
      if (!found.empty()) lex_.expect(",");
      if (lex_.word() != ".param") lex_.fail("expected .param");
      found.push_back(variable(Space::param));
    }
    return found;
  }

  void function(Module& module, bool is_entry) {
    Function f;
    f.is_entry = is_entry;
    if (!is_entry && lex_.at("(")) f.results = parameters();
    f.name = lex_.word();
    if (lex_.at("(")) f.parameters = parameters();
    while (!lex_.at("{") && !lex_.at(";")) {
      const std::string word = lex_.word();
      std::vector<unsigned> numbers;
      do {
        if (lex_.now().kind == Token::number)
          numbers.push_back(unsigned(number_of(lex_.take().is)));
      } while (lex_.accept(","));
      if (word == ".maxntid") {
        f.max_threads = 1;
        for (unsigned n : numbers) f.max_threads *= n;
      } else if (word != ".minnctapersm" && word != ".noreturn") {
        lex_.fail("unknown directive " + word);
      }
    }
    if (lex_.accept(";")) return;  // a declaration
    lex_.expect("{");
    function_ = &f;
    scopes_ = {{}};
    while (!scopes_.empty()) statement();
    module.functions[f.name] = std::move(f);
  }

  void statement() {
    Function& f = *function_;
    if (lex_.accept("{")) return scopes_.emplace_back(), void();
    if (lex_.accept("}")) return scopes_.pop_back();
    Statement s{.name = {}, .line = lex_.now().line};
    if (lex_.accept("@")) {
      s.guard_negated = lex_.accept("!");
      const Operand p = operand();
      if (p.kind != Operand::reg) lex_.fail("a guard that is no register");
      s.guard = int(p.number);
    }
    s.name = lex_.word();
    if (lex_.accept(":")) {
      f.labels[s.name] = f.body.size();
      return;
    }
    if (s.name == ".reg") return registers();
    if (s.name == ".pragma") {
      while (!lex_.accept(";")) lex_.take();
      return;
    }
    if (s.name == ".local" || s.name == ".shared" || s.name == ".param") {
      const Space space = s.name == ".local"    ? Space::local
                          : s.name == ".shared" ? Space::shared
                                                : Space::param;
      Variable v = variable(space);
      const std::string written = v.name;
      v.name += "@" + std::to_string(f.variables.size());  // call sequences use names again
      scopes_.back().variables[written] = v.name;
      f.variables.push_back(v);
      return lex_.expect(";");
    }
    if (s.name[0] == '.') lex_.fail("unknown directive " + s.name);
    while (!lex_.accept(";")) {
      if (!s.operands.empty()) lex_.expect(",");
      s.operands.push_back(operand());
    }
    f.body.push_back(std::move(s));
  }

  void registers() {
    Function& f = *function_;
    const Type type = type_of(lex_.word(), lex_);
    do {
      const std::string name = lex_.word();
      unsigned count = 1;
      Scope& scope = scopes_.back();
      if (lex_.accept("<")) {
        count = unsigned(number_of(lex_.take().is));
        lex_.expect(">");
        scope.families[name] = unsigned(f.registers.size());
      } else {
        scope.registers[name] = unsigned(f.registers.size());
      }
      f.registers.insert(f.registers.end(), count, type.width);
    } while (lex_.accept(","));
    lex_.expect(";");
  }

  Operand name_operand(const std::string& name) const {
    if (name == "_") return {.kind = Operand::sink};
    std::size_t digits = name.size();
    while (digits > 0 && std::isdigit(static_cast<unsigned char>(name[digits - 1]))) --digits;
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      if (const auto r = scope->registers.find(name); r != scope->registers.end()) {
        return {.kind = Operand::reg, .name = name, .number = r->second};
      }
      const auto family = scope->families.find(name.substr(0, digits));
      if (digits < name.size() && family != scope->families.end()) {
        const std::uint64_t index = number_of(name.substr(digits));
        return {.kind = Operand::reg, .name = name, .number = family->second + index};
      }
      if (const auto v = scope->variables.find(name); v != scope->variables.end()) {
        return {.kind = Operand::symbol, .name = v->second};
      }
    }
    return {.kind = name[0] == '%' ? Operand::special : Operand::symbol, .name = name};
  }

  Operand sequence(Operand::Kind kind, std::string_view close) {
    Operand o{.kind = kind};
    while (!lex_.accept(close)) {
      if (!o.items.empty()) lex_.expect(",");
      o.items.push_back(operand());
    }
    return o;
  }
  Operand memory() {
    Operand o{.kind = Operand::memory};
    o.items.push_back(operand());
    while (!lex_.accept("]")) {
      if (lex_.accept("+")) {
        o.number += operand().number;
      } else {
        lex_.expect(",");
        for (Operand& x : operand().items) o.items.push_back(x);
      }
    }
    return o;
  }

  Operand operand() {
    if (lex_.accept("{")) return sequence(Operand::vector, "}");
    if (lex_.accept("(")) return sequence(Operand::list, ")");
    if (lex_.accept("[")) return memory();
    if (lex_.accept("!")) {
      Operand o = operand();
      o.negated = true;
      return o;
    }
    const bool minus = lex_.accept("-");
    if (lex_.now().kind == Token::number) {
      const std::string_view is = lex_.take().is;
      if (is.size() == 10 && (is.substr(0, 2) == "0f" || is.substr(0, 2) == "0F")) {
        return {.kind = Operand::real32, .number = number_of("0x" + std::string(is.substr(2)))};
      }
      if (is.size() == 18 && (is.substr(0, 2) == "0d" || is.substr(0, 2) == "0D")) {
        return {.kind = Operand::real64, .number = number_of("0x" + std::string(is.substr(2)))};
      }
      const std::uint64_t bits = number_of(is);
      return {.kind = Operand::integer, .number = minus ? 0 - bits : bits};
    }
    Operand o = name_operand(lex_.word());
    if (!lex_.accept("|")) return o;
    Operand both{.kind = Operand::pair};
    both.items = {o, operand()};
    return both;
  }

  struct Scope {
    std::map<std::string, unsigned> registers, families;
    std::map<std::string, std::string> variables;
  };
  Lexer lex_;
  Function* function_ = nullptr;
  std::vector<Scope> scopes_;
};

}  // namespace

std::unique_ptr<Module> parse(std::string_view text) {
  auto module = Parser(text).run();
  while (!text.empty() && text[0]) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    module->lines.emplace_back(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return module;
}

}  // namespace ptx
