#include "phalanx/data/jinja/run.h"

#include <fmt/format.h>

#include <algorithm>

#include "phalanx/data/jinja/functions.h"
#include "phalanx/data/jinja/operators.h"

namespace phalanx::jinja {

namespace {
constexpr std::size_t kBytesOfKept = 512;  // of a scope or a namespace that lives to the end
}

Value* Scope::find(std::string_view name) {
  for (auto& [known, value] : variables) {
    if (known == name) return &value;
  }
  return nullptr;
}

void Scope::set(const std::string& name, Value value) {
  if (Value* known = find(name)) {
    *known = std::move(value);
  } else {
    variables.emplace_back(name, std::move(value));
  }
}

std::optional<Value> Namespace::attribute(std::string_view name) const {
  const Value* found = scope_.find(name);
  return found != nullptr ? std::optional(*found) : std::nullopt;
}

void Namespace::set(const std::string& name, Value value) {
  if (name.starts_with('_')) {
    throw EvaluationError(
        fmt::format("a namespace has no attributes that begin with an underscore, such as '{}'", name));
  }
  scope_.set(name, std::move(value));
}

Run::Run(const Context& context, const RenderOptions& options)
    : options_(options), globals_(std::make_shared<Scope>(nullptr)), output_(&rendered_.text) {
  for (const auto& [name, value] : context) globals_->set(name, value);
  scope_ = std::make_shared<Scope>(globals_);
  keep(scope_);
}

Run::~Run() {
  for (const auto& scope : kept_scopes_) scope->variables.clear();
  for (const auto& space : namespaces_) space->clear();
}

void Run::keep(std::shared_ptr<Scope> scope) {
  charge(kBytesOfKept);
  kept_scopes_.push_back(std::move(scope));
}

std::shared_ptr<Namespace> Run::make_namespace() {
  charge(kBytesOfKept);
  namespaces_.push_back(std::make_shared<Namespace>());
  return namespaces_.back();
}

void Run::step(int line) {
  line_ = line;
  if (++steps_ > options_.limits.steps) {
    throw EvaluationError(fmt::format("it takes more than {} steps: a loop that is too long?", options_.limits.steps));
  }
}

void Run::charge(std::size_t bytes) {
  bytes_ += static_cast<std::int64_t>(std::min<std::size_t>(bytes, std::size_t{1} << 40));
  if (bytes_ > options_.limits.bytes) {
    throw EvaluationError(fmt::format("it makes more than {} bytes of values", options_.limits.bytes));
  }
}

std::tm Run::now() const {
  if (options_.clock) return options_.clock();
  const std::time_t seconds = std::time(nullptr);
  std::tm local{};
  localtime_r(&seconds, &local);
  return local;
}

namespace {

/// Counts how deep expressions, blocks and macros are inside each other.
class Level {
 public:
  Level(int& depth, int limit) : depth_(depth) {
    if (depth >= limit) {
      throw EvaluationError(
          fmt::format("it nests deeper than {} levels: a macro that calls itself without end?", limit));
    }
    ++depth_;
  }
  ~Level() { --depth_; }
  Level(const Level&) = delete;
  Level& operator=(const Level&) = delete;

 private:
  int& depth_;
};

}  // namespace

Value Run::evaluate(const Expression& expression) {
  const Level level(depth_, options_.limits.depth);
  step(expression.line);
  return expression.evaluate(*this);
}

Flow Run::execute(const Block& block) {
  const Level level(depth_, options_.limits.depth);
  for (const auto& statement : block) {
    step(statement->line);
    if (const Flow flow = statement->execute(*this); flow != Flow::next) return flow;
  }
  return Flow::next;
}

Arguments Run::evaluate(const CallArguments& arguments) {
  Arguments values;
  for (const auto& argument : arguments.positional) values.positional.push_back(evaluate(*argument));
  for (const auto& [name, argument] : arguments.named) values.named.emplace_back(name, evaluate(*argument));
  return values;
}

Value Run::look_up(const std::string& name) {
  for (Scope* scope = scope_.get(); scope != nullptr; scope = scope->outer.get()) {
    if (const Value* found = scope->find(name)) return *found;
  }
  if (auto function = global_function(name)) return *function;
  return Undefined{fmt::format("'{}' is undefined", name)};
}

void Run::assign(const Target& target, const Value& value) {
  if (target.parts.empty() && target.attribute.empty()) return assign(target.name, value);
  if (target.parts.empty()) {
    const Value space = look_up(target.name);
    auto* object = space.is_object() ? dynamic_cast<Namespace*>(&space.object()) : nullptr;
    if (object == nullptr) throw EvaluationError("cannot assign attribute on non-namespace object");
    return object->set(target.attribute, value);
  }
  const auto items = value.iterate();
  if (items.size() != target.parts.size()) {
    throw EvaluationError(fmt::format("{} values are assigned to {} names", items.size(), target.parts.size()));
  }
  for (std::size_t i = 0; i < items.size(); ++i) assign(target.parts[i], items[i]);
}

void Run::write(std::string_view text) {
  charge(text.size());
  written_ += static_cast<std::int64_t>(text.size());
  if (written_ > options_.limits.output_bytes) {
    throw EvaluationError(fmt::format("it writes more than {} bytes", options_.limits.output_bytes));
  }
  output_->append(text);
}

std::string Run::capture(const Block& body, const std::shared_ptr<Scope>& scope, const Arguments& variables) {
  const InnerScope inner(*this, scope);
  for (const auto& [name, value] : variables.named) assign(name, value);
  std::string text;
  std::string* const outer = std::exchange(output_, &text);
  try {
    execute(body);
  } catch (...) {
    output_ = outer;
    throw;
  }
  output_ = outer;
  return text;
}

void Run::generate(const Block& body) {
  const InnerScope inner(*this);
  const std::size_t begin = output_->size();
  execute(body);
  if (output_ == &rendered_.text) {
    rendered_.generated.push_back({begin, output_->size()});
  } else {
    rendered_.lost_marks = true;
  }
}

}  // namespace phalanx::jinja
