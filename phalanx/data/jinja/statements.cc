#include <fmt/format.h>

#include <algorithm>

#include "phalanx/data/jinja/functions.h"
#include "phalanx/data/jinja/operators.h"
#include "phalanx/data/jinja/python_text.h"
#include "phalanx/data/jinja/run.h"

namespace phalanx::jinja {
namespace {

class Macro : public Object {
 public:
  Macro(const MacroDefinition& definition, std::shared_ptr<Scope> scope)
      : definition_(definition), scope_(std::move(scope)) {}
  std::string type_name() const override { return "Macro"; }
  bool is_callable() const override { return true; }
  std::optional<Value> attribute(std::string_view name) const override {
    return name == "name" ? std::optional(Value(definition_.name)) : std::nullopt;
  }

  Value call(Run& run, const Arguments& arguments) override {
    std::vector<std::optional<Value>> given = positional(arguments);
    Arguments variables = named(arguments, given);
    const InnerScope inner(run, scope_);
    for (auto& [name, value] : variables.named) run.assign(name, std::move(value));
    const std::size_t first_default = given.size() - definition_.defaults.size();
    for (std::size_t i = 0; i < given.size(); ++i) {
      const std::string& name = definition_.parameters[i];
      if (!given[i] && i >= first_default) given[i] = run.evaluate(*definition_.defaults[i - first_default]);
      if (!given[i]) given[i] = Undefined{fmt::format("parameter '{}' was not provided", name)};
      run.assign(name, std::move(*given[i]));
    }
    return Value(run.capture(definition_.body, run.scope()));
  }

 private:
  std::vector<std::optional<Value>> positional(const Arguments& arguments) const {
    std::vector<std::optional<Value>> given(definition_.parameters.size());
    if (arguments.positional.size() > given.size() && !definition_.takes_varargs) {
      throw EvaluationError(
          fmt::format("macro '{}' takes not more than {} argument(s)", definition_.name, given.size()));
    }
    for (std::size_t i = 0; i < std::min(given.size(), arguments.positional.size()); ++i) {
      given[i] = arguments.positional[i];
    }
    return given;
  }
  /// Fills in the parameters that are given by name. Returns varargs, kwargs and caller.
  Arguments named(const Arguments& arguments, std::vector<std::optional<Value>>& given) const {
    Value caller = Undefined{"No caller defined"};
    std::vector<std::pair<Value, Value>> others;
    for (const auto& [name, value] : arguments.named) {
      const auto found = std::ranges::find(definition_.parameters, name);
      if (found != definition_.parameters.end()) {
        auto& place = given[static_cast<std::size_t>(found - definition_.parameters.begin())];
        if (place) throw EvaluationError(fmt::format("macro '{}' got two values for '{}'", definition_.name, name));
        place = value;
      } else if (name == "caller" && definition_.takes_caller) {
        caller = value;
      } else if (definition_.takes_kwargs) {
        others.emplace_back(name, value);
      } else {
        throw EvaluationError(fmt::format("macro '{}' takes no keyword argument '{}'", definition_.name, name));
      }
    }
    Arguments made;
    if (definition_.takes_caller) made.named.emplace_back("caller", std::move(caller));
    if (definition_.takes_kwargs) made.named.emplace_back("kwargs", Value::dict(std::move(others)));
    if (definition_.takes_varargs) made.named.emplace_back("varargs", rest(arguments, given.size()));
    return made;
  }
  static Value rest(const Arguments& arguments, std::size_t taken) {
    const auto& all = arguments.positional;
    const auto from = all.begin() + static_cast<std::ptrdiff_t>(std::min(taken, all.size()));
    return Value::list({from, all.end()}, ListKind::tuple);
  }

  const MacroDefinition& definition_;
  std::shared_ptr<Scope> scope_;
};

/// The `loop` of a for.
class Loop : public Object {
 public:
  Loop(const For& statement, const std::vector<Value>& items, std::shared_ptr<Scope> scope, int depth)
      : statement_(statement), items_(items), scope_(std::move(scope)), depth_(depth) {}
  std::string type_name() const override { return "LoopContext"; }
  bool is_callable() const override { return true; }
  void go_to(std::size_t index) { index_ = index; }

  std::optional<Value> attribute(std::string_view name) const override {
    const auto index = static_cast<std::int64_t>(index_), length = static_cast<std::int64_t>(items_.size());
    if (name == "index") return Value(index + 1);
    if (name == "index0") return Value(index);
    if (name == "revindex") return Value(length - index);
    if (name == "revindex0") return Value(length - index - 1);
    if (name == "first") return Value(index == 0);
    if (name == "last") return Value(index + 1 == length);
    if (name == "length") return Value(length);
    if (name == "depth") return Value(depth_ + 1);
    if (name == "depth0") return Value(depth_);
    if (name == "previtem") return index > 0 ? items_[index_ - 1] : Value(Undefined{"there is no previous item"});
    if (name == "nextitem") return index + 1 < length ? items_[index_ + 1] : Value(Undefined{"there is no next item"});
    if (name == "cycle") return native_function("loop.cycle", cycle, Value(index));
    if (name == "changed") return native_function("loop.changed", changed, Value(changes_));
    return std::nullopt;
  }

  Value call(Run& run, const Arguments& arguments) override {
    if (!statement_.is_recursive) {
      throw EvaluationError("The loop must have the 'recursive' marker to be called recursively");
    }
    const Bound bound("loop", arguments, {"iterable"});
    struct Body : Statement {
      Body(const For& loop, std::vector<Value> items, int depth)
          : Statement(loop.line), loop(loop), items(std::move(items)), depth(depth) {}
      Flow execute(Run& run) const override { return loop.loop_over(run, items, depth); }
      const For& loop;
      std::vector<Value> items;
      int depth;
    };
    Block block;
    block.push_back(std::make_unique<Body>(statement_, bound.at(0).iterate(), depth_ + 1));
    return Value(run.capture(block, scope_));
  }

 private:
  /// What loop.changed() was called with last.
  struct Changes : Object {
    std::string type_name() const override { return "loop.changed"; }
    std::optional<Value> last;
  };
  static Value cycle(Run&, const Value& bound, const Arguments& arguments) {
    const auto& values = arguments.positional;
    if (values.empty()) throw EvaluationError("no items for cycling given");
    return values[static_cast<std::size_t>(bound.integer()) % values.size()];
  }
  static Value changed(Run&, const Value& bound, const Arguments& arguments) {
    auto& changes = static_cast<Changes&>(bound.object());
    Value now = Value::list(arguments.positional, ListKind::tuple);
    if (changes.last && equal(*changes.last, now)) return Value(false);
    changes.last = std::move(now);
    return Value(true);
  }

  const For& statement_;
  const std::vector<Value> items_;
  std::shared_ptr<Scope> scope_;
  int depth_;
  std::size_t index_ = 0;
  std::shared_ptr<Object> changes_ = std::make_shared<Changes>();
};

Value macro_value(Run& run, const MacroDefinition& definition) {
  run.keep(run.scope());
  return Value(std::static_pointer_cast<Object>(std::make_shared<Macro>(definition, run.scope())));
}

/// What a filter of a block makes of its text.
Value filtered(Run& run, const ExpressionPtr& filter, std::string text) {
  if (!filter) return Value(std::move(text));
  const InnerScope inner(run);
  run.assign(kBlockText, Value(std::move(text)));
  return run.evaluate(*filter);
}

}  // namespace

Flow Data::execute(Run& run) const {
  run.write(text);
  return Flow::next;
}

Flow Print::execute(Run& run) const {
  const Value printed = run.evaluate(*value);
  if (printed.is_text()) {
    run.write(printed.text());
  } else {
    run.charge(static_cast<std::size_t>(printed.weight()));
    run.write(str(printed));
  }
  return Flow::next;
}

Flow If::execute(Run& run) const {
  for (const auto& [condition, body] : branches) {
    if (run.evaluate(*condition).truth()) return run.execute(body);
  }
  return run.execute(otherwise);
}

std::vector<Value> For::chosen(Run& run, std::vector<Value> all) const {
  std::vector<Value> kept;
  for (Value& item : all) {
    const InnerScope inner(run);
    run.assign(target, item);
    if (run.evaluate(*condition).truth()) kept.push_back(std::move(item));
  }
  return kept;
}

Flow For::execute(Run& run) const {
  const Value over = run.evaluate(*items);
  run.charge(static_cast<std::size_t>(over.weight()));
  return loop_over(run, over.iterate(), 0);
}

Flow For::loop_over(Run& run, std::vector<Value> over, int depth) const {
  // Without `loop`, which knows the items to come, a condition sees what earlier turns did.
  if (condition && uses_loop) over = chosen(run, std::move(over));
  const auto loop = uses_loop ? std::make_shared<Loop>(*this, over, run.scope(), depth) : nullptr;
  bool has_run = false;
  for (std::size_t i = 0; i < over.size(); ++i) {
    const InnerScope inner(run);
    run.assign(target, over[i]);
    if (loop) {
      loop->go_to(i);
      run.assign("loop", Value(std::static_pointer_cast<Object>(loop)));
    } else if (condition && !run.evaluate(*condition).truth()) {
      continue;
    }
    has_run = true;
    if (run.execute(body) == Flow::break_loop) break;
  }
  return has_run ? Flow::next : run.execute(otherwise);
}

Flow Jump::execute(Run&) const { return flow; }

Flow Set::execute(Run& run) const {
  run.assign(target, run.evaluate(*value));
  return Flow::next;
}

Flow SetBlock::execute(Run& run) const {
  run.assign(target, filtered(run, filter, run.capture(body, run.scope())));
  return Flow::next;
}

Flow FilterBlock::execute(Run& run) const {
  run.write(str(filtered(run, filter, run.capture(body, run.scope()))));
  return Flow::next;
}

Flow With::execute(Run& run) const {
  std::vector<Value> made;
  for (const auto& [to, value] : values) made.push_back(run.evaluate(*value));
  const InnerScope inner(run);
  for (std::size_t i = 0; i < made.size(); ++i) run.assign(values[i].first, made[i]);
  return run.execute(body);
}

Flow DefineMacro::execute(Run& run) const {
  run.assign(macro.name, macro_value(run, macro));
  return Flow::next;
}

Flow CallBlock::execute(Run& run) const {
  const Value function = run.evaluate(*call->function);
  Arguments arguments = run.evaluate(call->arguments);
  arguments.named.emplace_back("caller", macro_value(run, caller));
  run.write(str(call_value(run, function, arguments)));
  return Flow::next;
}

Flow Generation::execute(Run& run) const {
  run.generate(body);
  return Flow::next;
}

}  // namespace phalanx::jinja
