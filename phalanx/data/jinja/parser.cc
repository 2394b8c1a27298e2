#include "phalanx/data/jinja/parser.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <set>

#include "phalanx/data/jinja/lexer.h"

namespace phalanx::jinja {
namespace {

// Blocks, brackets and operators nest at most so deep: parsing, running and freeing them is recursive.
constexpr int kMaxNesting = 100;
// a.b.c().d, a | b | c: each link is a level of its own.
constexpr int kMaxChain = 30;

using Names = std::set<std::string, std::less<>>;

class Parser {
 public:
  Parser(std::vector<Token> tokens, const std::string& name) : tokens_(std::move(tokens)), name_(name) {}

  SyntaxTree run() {
    SyntaxTree tree;
    tree.body = block_until({});
    tree.has_generation_marks = has_generation_marks_;
    return tree;
  }

 private:
  class Nesting {
   public:
    explicit Nesting(Parser& parser) : parser_(parser) {
      if (++parser_.nesting_ > kMaxNesting) parser_.fail(fmt::format("it nests deeper than {} levels", kMaxNesting));
    }
    ~Nesting() { --parser_.nesting_; }

   private:
    Parser& parser_;
  };

  // Tokens.
  const Token& now() const { return tokens_[at_]; }
  const Token& following() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  int line() const { return now().line; }
  [[noreturn]] void fail(const std::string& reason) const { fail_at(name_, line(), reason); }
  std::string shown() const {
    switch (now().kind) {
      case TokenKind::block_end:
        return "the end of the tag, %}";
      case TokenKind::print_end:
        return "the end of the expression, }}";
      case TokenKind::end:
        return "the end of the template";
      default:
        return fmt::format("'{}'", now().text);
    }
  }
  Token take() { return tokens_[at_ + 1 < tokens_.size() ? at_++ : at_]; }
  bool is_symbol(std::string_view symbol) const { return now().kind == TokenKind::symbol && now().text == symbol; }
  bool is_word(std::string_view word) const { return now().kind == TokenKind::name && now().text == word; }
  bool is_word(const Names& words) const { return now().kind == TokenKind::name && words.contains(now().text); }
  bool skip_symbol(std::string_view symbol) {
    const bool is = is_symbol(symbol);
    if (is) take();
    return is;
  }
  bool skip_word(std::string_view word) {
    const bool is = is_word(word);
    if (is) take();
    return is;
  }
  void expect_symbol(std::string_view symbol) {
    if (!skip_symbol(symbol)) fail(fmt::format("expected '{}', found {}", symbol, shown()));
  }
  void expect_word(std::string_view word) {
    if (!skip_word(word)) fail(fmt::format("expected '{}', found {}", word, shown()));
  }
  void expect(TokenKind kind) {
    if (now().kind != kind) {
      fail(fmt::format("expected {}, found {}", kind == TokenKind::block_end ? "%}" : "}}", shown()));
    }
    take();
  }
  std::string take_name() {
    if (now().kind != TokenKind::name) fail(fmt::format("expected a name, found {}", shown()));
    return take().text;
  }

  // Statements.

  /// Up to a tag that begins with one of `ends`, which is left to be read from its name on.
  Block block_until(const Names& ends) {
    const Nesting nesting(*this);
    const int opened = line();
    Block block;
    while (now().kind != TokenKind::end) {
      if (now().kind == TokenKind::data) {
        block.push_back(std::make_unique<Data>(line(), now().text));
        take();
      } else if (now().kind == TokenKind::print_begin) {
        block.push_back(print());
      } else {
        take();  // block_begin
        if (is_word(ends)) return block;
        if (auto made = statement()) block.push_back(std::move(made));
      }
    }
    if (!ends.empty()) {
      fail(fmt::format("the block of line {} has no end: expected {{% {} %}}", opened, fmt::join(ends, " %} or {% ")));
    }
    return block;
  }
  Block body_until(const Names& ends) {
    expect(TokenKind::block_end);
    return block_until(ends);
  }
  Block body_to(std::string_view end) {
    Block block = body_until({std::string(end)});
    take();
    expect(TokenKind::block_end);
    return block;
  }

  std::unique_ptr<Statement> print() {
    const int at = line();
    take();
    auto made = std::make_unique<Print>(at, tuple());
    expect(TokenKind::print_end);
    return made;
  }

  std::unique_ptr<Statement> statement() {
    const int at = line();
    const std::string word = take_name();
    if (word == "if") return if_statement(at);
    if (word == "for") return for_statement(at);
    if (word == "set") return set_statement(at);
    if (word == "macro") return macro_statement(at);
    if (word == "call") return call_statement(at);
    if (word == "filter") return filter_statement(at);
    if (word == "with") return with_statement(at);
    if (word == "generation") return generation_statement(at);
    if (word == "break" || word == "continue") return jump_statement(at, word);
    for (const char* known : {"include", "import", "from", "extends", "block", "do", "trans", "autoescape"}) {
      if (word == known) fail(fmt::format("{{% {} %}} is no statement of chat templates", word));
    }
    fail_at(name_, at, fmt::format("unknown statement '{}'", word));
  }

  std::unique_ptr<Statement> if_statement(int at) {
    auto made = std::make_unique<If>(at);
    for (;;) {
      ExpressionPtr condition = tuple(/*with_choice=*/false);
      Block body = body_until({"elif", "else", "endif"});
      made->branches.emplace_back(std::move(condition), std::move(body));
      const std::string word = take_name();
      if (word == "elif") continue;
      if (word == "else") {
        made->otherwise = body_until({"endif"});
        take();
      }
      expect(TokenKind::block_end);
      return made;
    }
  }

  std::unique_ptr<Statement> for_statement(int at) {
    auto made = std::make_unique<For>(at);
    made->target = target({"in"});
    expect_word("in");
    made->items = tuple(/*with_choice=*/false, {"recursive"});
    if (skip_word("if")) made->condition = expression();
    made->is_recursive = skip_word("recursive");
    Names outer;
    outer.swap(names_);
    ++loops_;
    made->body = body_until({"else", "endfor"});
    --loops_;
    made->uses_loop = names_.contains("loop");
    names_.merge(outer);
    if (skip_word("else")) made->otherwise = body_until({"endfor"});
    take();
    expect(TokenKind::block_end);
    return made;
  }

  std::unique_ptr<Statement> set_statement(int at) {
    Target to = target({}, /*with_attribute=*/true);
    if (skip_symbol("=")) {
      auto made = std::make_unique<Set>(at);
      made->target = std::move(to);
      made->value = tuple();
      expect(TokenKind::block_end);
      return made;
    }
    auto made = std::make_unique<SetBlock>(at);
    made->target = std::move(to);
    made->filter = filters(nullptr);
    made->body = outside_of_loops([&] { return body_to("endset"); });
    return made;
  }

  std::unique_ptr<Statement> macro_statement(int at) {
    auto made = std::make_unique<DefineMacro>(at);
    const std::string name = take_name();
    made->macro = macro_after_name(name, "endmacro");
    return made;
  }

  MacroDefinition macro_after_name(const std::string& name, std::string_view end) {
    MacroDefinition macro;
    macro.name = name;
    if (skip_symbol("(")) parameters(macro);
    Names outer;
    outer.swap(names_);
    macro.body = outside_of_loops([&] { return body_to(end); });
    macro.takes_varargs = names_.contains("varargs");
    macro.takes_kwargs = names_.contains("kwargs");
    macro.takes_caller = names_.contains("caller");
    names_.merge(outer);
    return macro;
  }

  void parameters(MacroDefinition& macro) {
    while (!is_symbol(")")) {
      if (!macro.parameters.empty()) expect_symbol(",");
      macro.parameters.push_back(take_name());
      if (skip_symbol("=")) {
        macro.defaults.push_back(expression());
      } else if (!macro.defaults.empty()) {
        fail("a parameter without a default follows one with a default");
      }
    }
    take();
  }

  std::unique_ptr<Statement> call_statement(int at) {
    auto made = std::make_unique<CallBlock>(at);
    MacroDefinition head;
    if (skip_symbol("(")) parameters(head);
    ExpressionPtr called = expression();
    if (dynamic_cast<Call*>(called.get()) == nullptr) fail("{% call %} expects a call, such as {% call wrap() %}");
    made->call.reset(static_cast<Call*>(called.release()));
    made->caller = macro_after_name("caller", "endcall");
    made->caller.parameters = std::move(head.parameters);
    made->caller.defaults = std::move(head.defaults);
    return made;
  }

  std::unique_ptr<Statement> filter_statement(int at) {
    auto made = std::make_unique<FilterBlock>(at);
    made->filter = one_filter(nullptr);
    made->filter = filters(std::move(made->filter));
    made->body = outside_of_loops([&] { return body_to("endfilter"); });
    return made;
  }

  std::unique_ptr<Statement> with_statement(int at) {
    auto made = std::make_unique<With>(at);
    while (now().kind != TokenKind::block_end) {
      if (!made->values.empty()) expect_symbol(",");
      Target to = target({});
      expect_symbol("=");
      made->values.emplace_back(std::move(to), expression());
    }
    made->body = body_to("endwith");
    return made;
  }

  std::unique_ptr<Statement> generation_statement(int at) {
    auto made = std::make_unique<Generation>(at);
    has_generation_marks_ = true;
    made->body = outside_of_loops([&] { return body_to("endgeneration"); });
    return made;
  }

  std::unique_ptr<Statement> jump_statement(int at, const std::string& word) {
    if (loops_ == 0) fail(fmt::format("{{% {} %}} outside of a loop", word));
    expect(TokenKind::block_end);
    return std::make_unique<Jump>(at, word == "break" ? Flow::break_loop : Flow::continue_loop);
  }

  /// The body of a macro and its like is a function of its own: no break leaves it.
  template <class Read>
  Block outside_of_loops(const Read& read) {
    const int outer = std::exchange(loops_, 0);
    Block body = read();
    loops_ = outer;
    return body;
  }

  Target target(const Names& ends, bool with_attribute = false) {
    Target first = single_target(with_attribute);
    if (!is_symbol(",")) return first;
    Target all;
    all.parts.push_back(std::move(first));
    while (skip_symbol(",") && !is_word(ends) && !is_symbol(")") && !is_symbol("=")) {
      all.parts.push_back(single_target(with_attribute));
    }
    return all;
  }
  Target single_target(bool with_attribute) {
    const Nesting nesting(*this);
    if (skip_symbol("(")) {
      Target inner = target({}, with_attribute);
      expect_symbol(")");
      return inner;
    }
    Target made;
    made.name = take_name();
    for (const char* reserved : {"true", "false", "none", "True", "False", "None"}) {
      if (made.name == reserved) fail(fmt::format("'{}' cannot be assigned to", made.name));
    }
    if (with_attribute && skip_symbol(".")) made.attribute = take_name();
    return made;
  }

  // Expressions, from what binds least to what binds most.

  /// One expression, or several between commas: a tuple.
  ExpressionPtr tuple(bool with_choice = true, const Names& ends = {}) {
    const int at = line();
    const auto one = [&] { return with_choice ? expression() : disjunction(); };
    ExpressionPtr first = one();
    if (!is_symbol(",")) return first;
    std::vector<ExpressionPtr> items;
    items.push_back(std::move(first));
    while (skip_symbol(",") && !ends_tuple(ends)) items.push_back(one());
    return std::make_unique<ListDisplay>(at, ListKind::tuple, std::move(items));
  }
  bool ends_tuple(const Names& ends) const {
    return now().kind == TokenKind::block_end || now().kind == TokenKind::print_end || is_symbol(")") || is_word(ends);
  }

  ExpressionPtr expression() {
    const Nesting nesting(*this);
    ExpressionPtr value = disjunction();
    for (int links = 0; is_word("if"); ++links) {
      require_short_chain(links);
      auto made = std::make_unique<Choice>(line());
      take();
      made->then = std::move(value);
      made->condition = disjunction();
      if (skip_word("else")) made->otherwise = expression();
      value = std::move(made);
    }
    return value;
  }

  /// a + b - c: one node, however long the row.
  template <class Operand, class IsOperator>
  ExpressionPtr arithmetic(const Operand& operand, const IsOperator& is_operator) {
    const int at = line();
    ExpressionPtr first = operand();
    if (!is_operator()) return first;
    auto made = std::make_unique<Arithmetic>(at, std::move(first));
    while (is_operator()) {
      std::string symbol = take().text;
      made->rest.emplace_back(std::move(symbol), operand());
    }
    return made;
  }
  template <class Operand>
  ExpressionPtr junction(std::string_view word, const Operand& operand) {
    const int at = line();
    ExpressionPtr first = operand();
    if (!is_word(word)) return first;
    auto made = std::make_unique<Junction>(at, word == "and");
    made->parts.push_back(std::move(first));
    while (skip_word(word)) made->parts.push_back(operand());
    return made;
  }

  ExpressionPtr disjunction() {
    return junction("or", [&] { return conjunction(); });
  }
  ExpressionPtr conjunction() {
    return junction("and", [&] { return negation(); });
  }
  ExpressionPtr negation() {
    const Nesting nesting(*this);
    const int at = line();
    if (skip_word("not")) return std::make_unique<Negation>(at, negation());
    return comparison();
  }
  ExpressionPtr comparison() {
    const int at = line();
    ExpressionPtr first = sum();
    auto made = std::make_unique<Comparison>(at, nullptr);
    while (const auto symbol = comparison_symbol()) made->rest.emplace_back(*symbol, sum());
    if (made->rest.empty()) return first;
    made->first = std::move(first);
    return made;
  }
  std::optional<std::string> comparison_symbol() {
    for (const char* symbol : {"==", "!=", "<", "<=", ">", ">="}) {
      if (skip_symbol(symbol)) return symbol;
    }
    if (skip_word("in")) return "in";
    if (is_word("not") && following().kind == TokenKind::name && following().text == "in") {
      take();
      take();
      return "not in";
    }
    return std::nullopt;
  }
  ExpressionPtr sum() {
    return arithmetic([&] { return concatenation(); }, [&] { return is_symbol("+") || is_symbol("-"); });
  }
  ExpressionPtr concatenation() {
    const int at = line();
    std::vector<ExpressionPtr> parts;
    parts.push_back(product());
    while (skip_symbol("~")) parts.push_back(product());
    if (parts.size() == 1) return std::move(parts.front());
    return std::make_unique<Concatenation>(at, std::move(parts));
  }
  ExpressionPtr product() {
    return arithmetic([&] { return power(); },
                      [&] { return is_symbol("*") || is_symbol("/") || is_symbol("//") || is_symbol("%"); });
  }
  ExpressionPtr power() {
    return arithmetic([&] { return sign(true); }, [&] { return is_symbol("**"); });
  }
  ExpressionPtr sign(bool with_filters) {
    const Nesting nesting(*this);
    const int at = line();
    ExpressionPtr value;
    if (is_symbol("-") || is_symbol("+")) {
      const bool is_minus = take().text == "-";
      value = std::make_unique<Sign>(at, is_minus, sign(false));
    } else {
      value = primary();
    }
    value = postfix(std::move(value));
    return with_filters ? filters_and_tests(std::move(value)) : std::move(value);
  }

  ExpressionPtr primary() {
    const int at = line();
    switch (now().kind) {
      case TokenKind::name:
        return name_or_constant();
      case TokenKind::text: {
        std::string text;
        while (now().kind == TokenKind::text) text += take().text;
        return std::make_unique<Constant>(at, Value(std::move(text)));
      }
      case TokenKind::integer:
      case TokenKind::real:
        return number();
      default:
        break;
    }
    if (is_symbol("(")) return parenthesis();
    if (is_symbol("[")) return list_display();
    if (is_symbol("{")) return dict_display();
    fail(fmt::format("expected an expression, found {}", shown()));
  }

  ExpressionPtr name_or_constant() {
    const int at = line();
    const std::string name = take().text;
    if (name == "true" || name == "True") return std::make_unique<Constant>(at, Value(true));
    if (name == "false" || name == "False") return std::make_unique<Constant>(at, Value(false));
    if (name == "none" || name == "None") return std::make_unique<Constant>(at, Value(None{}));
    names_.insert(name);
    return std::make_unique<Name>(at, name);
  }

  ExpressionPtr number() {
    const int at = line();
    const Token token = take();
    const char* begin = token.text.data();
    const char* end = begin + token.text.size();
    std::int64_t whole = 0;
    double real = 0;
    const auto read =
        token.kind == TokenKind::integer ? std::from_chars(begin, end, whole) : std::from_chars(begin, end, real);
    if (read.ec != std::errc()) fail_at(name_, at, fmt::format("the number {} is out of range", token.text));
    return std::make_unique<Constant>(at, token.kind == TokenKind::integer ? Value(whole) : Value(real));
  }

  ExpressionPtr parenthesis() {
    const Nesting nesting(*this);
    const int at = line();
    take();
    if (skip_symbol(")")) return std::make_unique<ListDisplay>(at, ListKind::tuple, std::vector<ExpressionPtr>());
    ExpressionPtr value = tuple();
    expect_symbol(")");
    return value;
  }
  ExpressionPtr list_display() {
    const int at = line();
    take();
    std::vector<ExpressionPtr> items;
    while (!is_symbol("]")) {
      if (!items.empty()) expect_symbol(",");
      if (!is_symbol("]")) items.push_back(expression());
    }
    take();
    return std::make_unique<ListDisplay>(at, ListKind::list, std::move(items));
  }
  ExpressionPtr dict_display() {
    auto made = std::make_unique<DictDisplay>(line());
    take();
    while (!is_symbol("}")) {
      if (!made->entries.empty()) expect_symbol(",");
      if (is_symbol("}")) break;
      ExpressionPtr key = expression();
      expect_symbol(":");
      made->entries.emplace_back(std::move(key), expression());
    }
    take();
    return made;
  }

  void require_short_chain(int links) const {
    if (links > kMaxChain) fail(fmt::format("a chain of more than {} attributes, calls or filters", kMaxChain));
  }
  ExpressionPtr postfix(ExpressionPtr value) {
    for (int links = 0;; ++links) {
      require_short_chain(links);
      if (is_symbol(".") || is_symbol("[")) {
        value = subscript(std::move(value));
      } else if (is_symbol("(")) {
        value = call(std::move(value));
      } else {
        return value;
      }
    }
  }
  ExpressionPtr filters_and_tests(ExpressionPtr value) {
    for (int links = 0;; ++links) {
      require_short_chain(links);
      if (is_symbol("|")) {
        take();
        value = one_filter(std::move(value));
      } else if (is_word("is")) {
        value = test(std::move(value));
      } else if (is_symbol("(")) {
        value = call(std::move(value));
      } else {
        return value;
      }
    }
  }

  ExpressionPtr subscript(ExpressionPtr object) {
    const int at = line();
    if (skip_symbol(".")) {
      if (now().kind == TokenKind::integer) return std::make_unique<GetItem>(at, std::move(object), number());
      return std::make_unique<GetAttribute>(at, std::move(object), take_name());
    }
    take();
    ExpressionPtr key = is_symbol(":") ? nullptr : expression();
    if (is_symbol(":")) return slice(at, std::move(object), std::move(key));
    expect_symbol("]");
    return std::make_unique<GetItem>(at, std::move(object), std::move(key));
  }
  ExpressionPtr slice(int at, ExpressionPtr object, ExpressionPtr start) {
    auto made = std::make_unique<GetSlice>(at);
    made->object = std::move(object);
    made->start = std::move(start);
    take();
    if (!is_symbol(":") && !is_symbol("]")) made->stop = expression();
    if (skip_symbol(":") && !is_symbol("]")) made->step = expression();
    expect_symbol("]");
    return made;
  }

  ExpressionPtr call(ExpressionPtr function) {
    auto made = std::make_unique<Call>(line());
    made->function = std::move(function);
    made->arguments = arguments();
    return made;
  }
  CallArguments arguments() {
    const Nesting nesting(*this);
    CallArguments made;
    expect_symbol("(");
    while (!is_symbol(")")) {
      if (!made.positional.empty() || !made.named.empty()) expect_symbol(",");
      if (is_symbol(")")) break;
      if (is_symbol("*") || is_symbol("**")) fail("a call with * or ** is not supported");
      if (now().kind == TokenKind::name && following().kind == TokenKind::symbol && following().text == "=") {
        std::string name = take().text;
        take();
        made.named.emplace_back(std::move(name), expression());
      } else {
        if (!made.named.empty()) fail("an argument without a name follows one with a name");
        made.positional.push_back(expression());
      }
    }
    take();
    return made;
  }

  /// Every `| filter` that stands here.
  ExpressionPtr filters(ExpressionPtr input) {
    for (int links = 0; skip_symbol("|"); ++links) {
      require_short_chain(links);
      input = one_filter(std::move(input));
    }
    return input;
  }
  ExpressionPtr one_filter(ExpressionPtr input) {
    auto made = std::make_unique<FilterCall>(line());
    made->name = dotted_name();
    made->input = std::move(input);
    if (is_symbol("(")) made->arguments = arguments();
    return made;
  }
  std::string dotted_name() {
    std::string name = take_name();
    while (skip_symbol(".")) name += "." + take_name();
    return name;
  }

  ExpressionPtr test(ExpressionPtr input) {
    const int at = line();
    take();
    const bool is_negated = skip_word("not");
    auto made = std::make_unique<TestCall>(at);
    made->name = dotted_name();
    made->input = std::move(input);
    if (is_symbol("(")) {
      made->arguments = arguments();
    } else if (begins_argument_of_test()) {
      made->arguments.positional.push_back(postfix(primary()));
    }
    if (!is_negated) return made;
    return std::make_unique<Negation>(at, std::move(made));
  }
  bool begins_argument_of_test() const {
    if (now().kind == TokenKind::name) {
      if (is_word("is")) fail("tests cannot be chained with is");
      return !is_word("else") && !is_word("or") && !is_word("and");
    }
    return now().kind == TokenKind::text || now().kind == TokenKind::integer || now().kind == TokenKind::real ||
           is_symbol("[") || is_symbol("{");
  }

  std::vector<Token> tokens_;
  const std::string& name_;
  std::size_t at_ = 0;
  int nesting_ = 0;
  int loops_ = 0;  // that a break could leave
  Names names_;    // read in the macro that is being parsed
  bool has_generation_marks_ = false;
};

}  // namespace

SyntaxTree parse_template(std::string_view source, const std::string& name) {
  return Parser(tokens_of(source, name), name).run();
}

}  // namespace phalanx::jinja
