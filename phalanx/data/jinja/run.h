// Run: the state of one rendering. Inside of data/jinja only; users see template.h.
#pragma once

#include <ctime>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "phalanx/data/jinja/syntax.h"
#include "phalanx/data/jinja/template.h"
#include "phalanx/data/jinja/value.h"

namespace phalanx::jinja {

/// The variables of a block that has its own: of the template, a macro, a turn of a loop.
struct Scope {
  explicit Scope(std::shared_ptr<Scope> outer) : outer(std::move(outer)) {}
  Value* find(std::string_view name);
  void set(const std::string& name, Value value);
  std::shared_ptr<Scope> outer;
  std::vector<std::pair<std::string, Value>> variables;
};

/// namespace(...): the one value that templates change.
class Namespace : public Object {
 public:
  std::string type_name() const override { return "Namespace"; }
  std::optional<Value> attribute(std::string_view name) const override;
  /// Throws EvaluationError for a name that begins with an underscore.
  void set(const std::string& name, Value value);
  void clear() { scope_.variables.clear(); }

 private:
  mutable Scope scope_{nullptr};
};

class Run {
 public:
  Run(const Context& context, const RenderOptions& options);
  ~Run();
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  Value evaluate(const Expression& expression);
  /// Up to the first break or continue.
  Flow execute(const Block& block);
  Arguments evaluate(const CallArguments& arguments);

  Value look_up(const std::string& name);
  void assign(const Target& target, const Value& value);
  void assign(const std::string& name, Value value) { scope_->set(name, std::move(value)); }
  const std::shared_ptr<Scope>& scope() const { return scope_; }

  void write(std::string_view text);
  /// What `body` writes. It has a scope of its own, inside `scope`.
  std::string capture(const Block& body, const std::shared_ptr<Scope>& scope, const Arguments& variables = {});
  /// Writes what `body` writes, and remembers where.
  void generate(const Block& body);

  /// Takes bytes out of the budget. Throws EvaluationError when it is used up.
  void charge(std::size_t bytes);
  std::tm now() const;

  /// What holds on to scopes or namespaces is freed at the end, in any order: they may hold each other.
  void keep(std::shared_ptr<Scope> scope);
  std::shared_ptr<Namespace> make_namespace();

  int line() const { return line_; }
  Rendered result() { return std::move(rendered_); }

 private:
  friend class InnerScope;
  void step(int line);

  const RenderOptions& options_;
  std::shared_ptr<Scope> globals_, scope_;
  std::vector<std::shared_ptr<Scope>> kept_scopes_;
  std::vector<std::shared_ptr<Namespace>> namespaces_;
  Rendered rendered_;
  std::string* output_;
  std::int64_t steps_ = 0, bytes_ = 0, written_ = 0;
  int depth_ = 0, line_ = 1;
};

/// The name of the text of a {% filter %} block; no template can spell it.
inline constexpr const char* kBlockText = " block";

/// Throws EvaluationError if `function` cannot be called.
Value call_value(Run& run, const Value& function, const Arguments& arguments);

/// A scope until the end of the block.
class InnerScope {
 public:
  InnerScope(Run& run, std::shared_ptr<Scope> outer) : run_(run), before_(run.scope_) {
    run.scope_ = std::make_shared<Scope>(std::move(outer));
  }
  explicit InnerScope(Run& run) : InnerScope(run, run.scope()) {}
  ~InnerScope() { run_.scope_ = before_; }
  InnerScope(const InnerScope&) = delete;
  InnerScope& operator=(const InnerScope&) = delete;

 private:
  Run& run_;
  std::shared_ptr<Scope> before_;
};

}  // namespace phalanx::jinja
