// The syntax tree of a template. Its nodes evaluate themselves, in the Run of one rendering.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "phalanx/data/jinja/value.h"

namespace phalanx::jinja {

/// Call Run::evaluate(), which counts the step and knows the line, rather than evaluate().
class Expression {
 public:
  explicit Expression(int line) : line(line) {}
  virtual ~Expression() = default;
  virtual Value evaluate(Run& run) const = 0;
  const int line;
};
using ExpressionPtr = std::unique_ptr<Expression>;

/// What happens after a statement: in a loop, {% break %} or {% continue %}.
enum class Flow { next, break_loop, continue_loop };

class Statement {
 public:
  explicit Statement(int line) : line(line) {}
  virtual ~Statement() = default;
  virtual Flow execute(Run& run) const = 0;
  const int line;
};
using Block = std::vector<std::unique_ptr<Statement>>;

struct CallArguments {
  std::vector<ExpressionPtr> positional;
  std::vector<std::pair<std::string, ExpressionPtr>> named;
};

struct Constant : Expression {
  Constant(int line, Value value) : Expression(line), value(std::move(value)) {}
  Value evaluate(Run& run) const override;
  Value value;
};

struct Name : Expression {
  Name(int line, std::string name) : Expression(line), name(std::move(name)) {}
  Value evaluate(Run& run) const override;
  std::string name;
};

struct ListDisplay : Expression {
  ListDisplay(int line, ListKind kind, std::vector<ExpressionPtr> items)
      : Expression(line), kind(kind), items(std::move(items)) {}
  Value evaluate(Run& run) const override;
  ListKind kind;  // list or tuple
  std::vector<ExpressionPtr> items;
};

struct DictDisplay : Expression {
  using Expression::Expression;
  Value evaluate(Run& run) const override;
  std::vector<std::pair<ExpressionPtr, ExpressionPtr>> entries;
};

struct GetAttribute : Expression {
  GetAttribute(int line, ExpressionPtr object, std::string name)
      : Expression(line), object(std::move(object)), name(std::move(name)) {}
  Value evaluate(Run& run) const override;
  ExpressionPtr object;
  std::string name;
};

struct GetItem : Expression {
  GetItem(int line, ExpressionPtr object, ExpressionPtr key)
      : Expression(line), object(std::move(object)), key(std::move(key)) {}
  Value evaluate(Run& run) const override;
  ExpressionPtr object, key;
};

struct GetSlice : Expression {
  using Expression::Expression;
  Value evaluate(Run& run) const override;
  ExpressionPtr object, start, stop, step;  // all but the object may be null
};

struct Call : Expression {
  using Expression::Expression;
  Value evaluate(Run& run) const override;
  ExpressionPtr function;
  CallArguments arguments;
};

struct FilterCall : Expression {
  using Expression::Expression;
  Value evaluate(Run& run) const override;
  std::string name;
  ExpressionPtr input;  // null: the text of a {% filter %} or {% set %} block
  CallArguments arguments;
};

struct TestCall : Expression {
  using Expression::Expression;
  Value evaluate(Run& run) const override;
  std::string name;
  ExpressionPtr input;
  CallArguments arguments;
};

struct Negation : Expression {  // not x
  Negation(int line, ExpressionPtr operand) : Expression(line), operand(std::move(operand)) {}
  Value evaluate(Run& run) const override;
  ExpressionPtr operand;
};

struct Sign : Expression {  // -x, +x
  Sign(int line, bool is_minus, ExpressionPtr operand)
      : Expression(line), is_minus(is_minus), operand(std::move(operand)) {}
  Value evaluate(Run& run) const override;
  bool is_minus;
  ExpressionPtr operand;
};

struct Arithmetic : Expression {  // a + b - c, from the left
  Arithmetic(int line, ExpressionPtr first) : Expression(line), first(std::move(first)) {}
  Value evaluate(Run& run) const override;
  ExpressionPtr first;
  std::vector<std::pair<std::string, ExpressionPtr>> rest;  // + - * / // % **
};

struct Concatenation : Expression {  // a ~ b ~ c
  Concatenation(int line, std::vector<ExpressionPtr> parts) : Expression(line), parts(std::move(parts)) {}
  Value evaluate(Run& run) const override;
  std::vector<ExpressionPtr> parts;
};

struct Comparison : Expression {  // a < b <= c
  Comparison(int line, ExpressionPtr first) : Expression(line), first(std::move(first)) {}
  Value evaluate(Run& run) const override;
  ExpressionPtr first;
  std::vector<std::pair<std::string, ExpressionPtr>> rest;  // == != < <= > >= in, not in
};

struct Junction : Expression {  // a and b and c, a or b or c
  Junction(int line, bool is_and) : Expression(line), is_and(is_and) {}
  Value evaluate(Run& run) const override;
  bool is_and;
  std::vector<ExpressionPtr> parts;
};

struct Choice : Expression {  // a if b else c
  using Expression::Expression;
  Value evaluate(Run& run) const override;
  ExpressionPtr condition, then, otherwise;  // otherwise may be null
};

/// What is assigned to: a name, ns.name, or several.
struct Target {
  std::string name;
  std::string attribute;      // of the namespace `name`; empty: the name itself
  std::vector<Target> parts;  // a, (b, c): then name is empty
};

struct Data : Statement {
  Data(int line, std::string text) : Statement(line), text(std::move(text)) {}
  Flow execute(Run& run) const override;
  std::string text;
};

struct Print : Statement {
  Print(int line, ExpressionPtr value) : Statement(line), value(std::move(value)) {}
  Flow execute(Run& run) const override;
  ExpressionPtr value;
};

struct If : Statement {
  using Statement::Statement;
  Flow execute(Run& run) const override;
  std::vector<std::pair<ExpressionPtr, Block>> branches;
  Block otherwise;
};

struct For : Statement {
  using Statement::Statement;
  Flow execute(Run& run) const override;
  /// The loop over `items`; `depth` counts the calls of loop() around it.
  Flow loop_over(Run& run, std::vector<Value> items, int depth) const;
  Target target;
  ExpressionPtr items, condition;  // the condition may be null
  bool is_recursive = false;
  bool uses_loop = false;  // its body names `loop`
  Block body, otherwise;

 private:
  std::vector<Value> chosen(Run& run, std::vector<Value> items) const;
};

struct Jump : Statement {  // {% break %}, {% continue %}
  Jump(int line, Flow flow) : Statement(line), flow(flow) {}
  Flow execute(Run& run) const override;
  Flow flow;
};

struct Set : Statement {
  using Statement::Statement;
  Flow execute(Run& run) const override;
  Target target;
  ExpressionPtr value;
};

struct SetBlock : Statement {
  using Statement::Statement;
  Flow execute(Run& run) const override;
  Target target;
  ExpressionPtr filter;  // may be null
  Block body;
};

struct FilterBlock : Statement {
  using Statement::Statement;
  Flow execute(Run& run) const override;
  ExpressionPtr filter;
  Block body;
};

struct With : Statement {
  using Statement::Statement;
  Flow execute(Run& run) const override;
  std::vector<std::pair<Target, ExpressionPtr>> values;
  Block body;
};

struct MacroDefinition {
  std::string name;
  std::vector<std::string> parameters;
  std::vector<ExpressionPtr> defaults;  // of the last parameters
  Block body;
  bool takes_varargs = false, takes_kwargs = false, takes_caller = false;  // its body names them
};

struct DefineMacro : Statement {
  using Statement::Statement;
  Flow execute(Run& run) const override;
  MacroDefinition macro;
};

struct CallBlock : Statement {
  using Statement::Statement;
  Flow execute(Run& run) const override;
  std::unique_ptr<Call> call;
  MacroDefinition caller;
};

/// {% generation %}: what the assistant says.
struct Generation : Statement {
  using Statement::Statement;
  Flow execute(Run& run) const override;
  Block body;
};

}  // namespace phalanx::jinja
