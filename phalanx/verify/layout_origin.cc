#include "phalanx/verify/layout_origin.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "phalanx/parallel/context/packed_positions.h"
#include "phalanx/train/model/token_batch.h"
#include "phalanx/verify/forward_trace.h"
#include "phalanx/verify/layout_cause.h"

namespace phalanx::verify {
namespace {

using nlohmann::json;

/// What one side used during a step.
struct Path {
  std::vector<std::unique_ptr<ForwardTrace>> traces;  // of the stages that this rank has
  at::Tensor tokens;  // [rows, 2 seq_len], float64: inputs, labels; then positions in documents
  std::shared_ptr<const DocumentBoundaries> documents;

  Path(LayoutSide& side, std::int64_t step) {
    const data::RowRange rows = side.rows();
    for (nn::Module* module : side.modules()) {
      traces.push_back(std::make_unique<ForwardTrace>(*module));
      traces.back()->start(rows.size());
    }
    for (const NamedTensor& p : side.model->parameters()) p.tensor.mutable_grad().reset();
    side.forward_backward(step);
    for (const auto& trace : traces) trace->note_uncalled();
    const train::TokenBatch batch = train::load_batch(*side.data.dataloader, step, rows, at::kCPU);
    tokens = at::cat({batch.inputs, batch.labels}, 1).to(at::kDouble);
    documents = batch.documents;
    if (documents) tokens = at::cat({tokens, documents->positions().to(at::kDouble)}, 1);
  }

  const ForwardTrace::ModuleRecord* find(const std::string& module) const {
    for (const auto& trace : traces) {
      if (const auto* seen = trace->find(module)) return seen;
    }
    return nullptr;
  }

  /// The module used next; "": none.
  std::string after(const std::string& module) const {
    for (const auto& trace : traces) {
      const auto& seen = trace->seen();
      const auto found = std::ranges::find(seen, module, &ForwardTrace::ModuleRecord::module);
      if (found != seen.end()) return found + 1 == seen.end() ? "" : (found + 1)->module;
    }
    return "";
  }
};

struct Verdict {
  int rank = -1;  // of the world; -1: no rank differs
  TensorDifference difference;
};

class Search {
 public:
  Search(LayoutSide& parallelized, LayoutSide* reference, Communicator& world, const LayoutPathOptions& options)
      : parallelized_(parallelized),
        reference_side_(reference),
        world_(world),
        options_(options),
        mine_(parallelized, options.step) {
    if (reference != nullptr) reference_ = std::make_unique<Path>(*reference, options.step);
  }

  LayoutPath run() {
    json steps = json::array();
    if (reference_) {
      for (const auto& seen : reference_->traces.front()->seen()) {
        steps.push_back({{"module", seen.module}, {"weight", seen.has_weight}});
      }
    }
    steps = json::parse(world_.broadcast_bytes(steps.dump()));
    LayoutPath path;
    for (const json& step : steps) {
      if (step["weight"]) path.parameters.push_back(step["module"].get<std::string>() + ".weight");
    }
    path.origin = batch();
    std::string last, before;  // the last module with a weight; the last module
    for (std::size_t i = 0; i < steps.size() && !path.origin; ++i) {
      const json& step = steps[i];
      const auto module = step["module"].get<std::string>();
      next_ = i + 1 < steps.size() ? steps[i + 1]["module"].get<std::string>() : "";
      const bool hands_on = !before.empty() && before != last;
      path.origin =
          input_of(module, hands_on ? module : last, hands_on ? "input" : "output", options_.activation_tolerance);
      if (path.origin && path.origin->cause.empty()) {
        path.origin->cause = stale_copy(path.parameters, module, last, path.origin->difference.relative / 10);
      }
      before = module;
      if (!step["weight"]) continue;
      last = module;
      if (!path.origin) path.origin = weight_of_module(module, &ForwardTrace::ModuleRecord::weight);
    }
    // For units that are unsharded again for the backward pass.
    for (auto step = steps.rbegin(); step != steps.rend() && !path.origin; ++step) {
      if ((*step)["weight"])
        path.origin = weight_of_module((*step)["module"], &ForwardTrace::ModuleRecord::backward_weight);
    }
    return path;
  }

 private:
  /// Where a rank's part of a tensor is.
  struct Place {
    std::vector<std::int64_t> offset;
    at::Tensor positions;  // with context parallelism, [rows, seq]: of dimension 1, in place of its offset
  };

  /// Rank 0's tensor on every rank; undefined on all ranks if it has none.
  at::Tensor shared(const at::Tensor& of_reference) {
    json shape;
    if (of_reference.defined()) shape = of_reference.sizes().vec();
    shape = json::parse(world_.broadcast_bytes(shape.dump()));
    if (shape.is_null()) return {};
    at::Tensor sent =
        reference_ ? of_reference.contiguous()
                   : at::empty(shape.get<std::vector<std::int64_t>>(), at::TensorOptions(at::kCPU).dtype(at::kDouble));
    world_.broadcast(sent).wait();
    return sent;
  }

  /// The rank with the largest difference, if it is more than `tolerance` of the full norm.
  Verdict worst_of_ranks(const SuspectValue& value, const Place& place, double norm, double tolerance) {
    TensorDifference mine;
    if (value.found.defined()) mine = difference_of(value.found, value.expected, norm, place.offset);
    if (place.positions.defined() && mine.index.size() > 1) {
      mine.index[1] = place.positions[mine.index[0] - place.offset[0]][mine.index[1]].item<std::int64_t>();
    }
    Verdict verdict{.difference = {.relative = tolerance}};
    int rank = 0;
    for (const std::string& text : world_.all_gather_bytes(to_text(mine))) {
      const TensorDifference theirs = difference_from_text(text);
      if (theirs.relative > verdict.difference.relative) verdict = {rank, theirs};
      ++rank;
    }
    return verdict;
  }

  std::optional<LayoutOrigin> judge(const SuspectValue& value, const Place& place, double norm, double tolerance,
                                    const std::string& what, const std::string& parameter) {
    const Verdict worst = worst_of_ranks(value, place, norm, tolerance);
    if (worst.rank < 0) return std::nullopt;
    return LayoutOrigin{.what = what,
                        .parameter = parameter,
                        .rank = worst.rank,
                        .difference = worst.difference,
                        .tolerance = tolerance,
                        .cause = likely_cause(value, parallelized_.model->mesh(), world_, worst.rank)};
  }

  std::optional<LayoutOrigin> batch() {
    const at::Tensor whole = shared(reference_ ? reference_->tokens : at::Tensor());
    const data::RowRange rows = parallelized_.rows();
    const SuspectValue value{.found = mine_.tokens,
                             .expected = whole.narrow(0, rows.begin, rows.size()),
                             .part = fmt::format("rows {}", rows.begin)};
    auto origin = judge(value, {.offset = {rows.begin, 0}}, whole.norm().item<double>(), 0, "batch", "");
    if (origin && origin->cause.empty()) {
      origin->cause = "this rank reads other tokens than one rank does: its files, its seed or its rows are others";
    }
    return origin;
  }

  /// This rank's part of a module's input, and its place: cut along the tokens' rows by data-parallel rank, along the
  /// positions by context-parallel rank, and along another dimension by tensor-parallel rank if it is that much
  /// shorter. Nothing if its shape does not fit.
  std::optional<std::pair<at::Tensor, Place>> own_part(const at::Tensor& whole, const at::Tensor& found) const {
    const data::RowRange rows = parallelized_.rows();
    if (found.dim() != whole.dim() || found.size(0) != rows.size()) return std::nullopt;
    const DeviceMesh& mesh = parallelized_.model->mesh();
    const bool is_cut = mesh.has("tp");
    Place place{.offset = std::vector<std::int64_t>(static_cast<std::size_t>(whole.dim())), .positions = {}};
    at::Tensor part = whole.narrow(0, rows.begin, rows.size());
    place.offset[0] = rows.begin;
    const ContextCut cut = parallelized_.plan.context_cut(parallelized_.options.rank);
    if (cut.ranks > 1 && whole.dim() == 3) {
      const std::int64_t seq = whole.size(1);
      if (cut.padded(seq) != seq) return std::nullopt;  // what padding becomes is nobody's business
      const at::Tensor all = at::arange(seq, at::TensorOptions(at::kLong)).expand({rows.size(), seq});
      if (cut.by_work && mine_.documents) {
        const PackedPositions packed(cut, *mine_.documents);
        part = packed.own(part);
        place.positions = packed.own(all);
      } else {
        const auto [head, tail] = cut.ranges(seq);
        const auto both = [&head = head, &tail = tail](const at::Tensor& x) {
          return at::cat({x.narrow(1, head.first, head.count), x.narrow(1, tail.first, tail.count)}, 1);
        };
        part = both(part);
        place.positions = both(all);
      }
    }
    for (std::int64_t dim = 1; dim < whole.dim(); ++dim) {
      const std::int64_t size = found.size(dim);
      if (size == part.size(dim)) continue;
      if (!is_cut || size * mesh.size("tp") != part.size(dim)) return std::nullopt;
      const std::int64_t first = size * mesh.coordinate("tp");
      part = part.narrow(dim, first, size);
      if (dim == 1 && place.positions.defined()) {
        place.positions = place.positions.narrow(1, first, size);
      } else {
        place.offset[static_cast<std::size_t>(dim)] = first;
      }
    }
    return std::pair(part, place);
  }

  std::optional<LayoutOrigin> input_of(const std::string& module, const std::string& from, const std::string& what,
                                       double tolerance) {
    const at::Tensor whole = shared(reference_ ? reference_->find(module)->input() : at::Tensor());
    if (!whole.defined() || from.empty()) return std::nullopt;
    // A stage may have only the end of a layer: its input is then not the input of the whole layer.
    const auto* seen = mine_.find(module);
    if (seen && !seen->has_weight && mine_.after(module) != next_) seen = nullptr;
    SuspectValue value;
    Place place;
    if (const at::Tensor found = seen ? seen->input() : at::Tensor(); found.defined()) {
      if (const auto part = own_part(whole, found)) {
        place = part->second;
        std::vector<std::int64_t> first = place.offset;
        if (place.positions.defined()) first[1] = place.positions[0][0].item<std::int64_t>();
        value = {.found = found, .expected = part->first, .part = json(first).dump()};
      }
    }
    return judge(value, place, whole.norm().item<double>(), tolerance, what, from + ".weight");
  }

  /// The input of `module` is wrong, although the weights up to `last` are right. Tests whether the reference gives it
  /// too, or something much closer to it, with the previous step's weights. Then a copy of them is out of date.
  std::string stale_copy(const std::vector<std::string>& parameters, const std::string& module, const std::string& last,
                         double tolerance) {
    if (last.empty()) return "";
    if (!shared(options_.weights_before.empty() ? at::Tensor() : at::Tensor(mine_.tokens)).defined()) return "";
    const auto may_be_stale = [&](const NamedTensor& p, bool alone) {
      if (p.name == last + ".weight") return true;
      // Rows of an embedding are read: no copy is made of it.
      const bool is_matrix = p.tensor.dim() == 2 && p.name.find("embeddings") == std::string::npos;
      return !alone && is_matrix &&
             std::ranges::find(parameters, p.name) < std::ranges::find(parameters, last + ".weight");
    };
    for (const bool alone : {true, false}) {
      if (reference_side_ != nullptr) {
        const at::NoGradGuard no_grad;
        std::vector<std::pair<at::Tensor, at::Tensor>> now;
        for (const NamedTensor& p : reference_side_->model->parameters()) {
          if (!may_be_stale(p, alone)) continue;
          now.emplace_back(p.tensor, p.tensor.clone());
          p.tensor.copy_(options_.weights_before.at(p.name));
        }
        spent_.push_back(std::move(reference_));  // its hooks stay on the modules
        {
          const at::AutoGradMode with_gradients(true);
          reference_ = std::make_unique<Path>(*reference_side_, options_.step);
        }
        for (const auto& [parameter, value] : now) parameter.copy_(value);
      }
      if (!input_of(module, last, "output", tolerance)) {
        return alone ? "stale: computed with the weight of the step before, though the weight itself is right: a copy "
                       "of it is out of date"
                     : "stale: computed with the weights of the step before, this one's and those used before it, "
                       "though the weights themselves are right: copies of them are out of date";
      }
    }
    return "";
  }

  std::optional<LayoutOrigin> weight_of_module(const std::string& module,
                                               at::Tensor ForwardTrace::ModuleRecord::*which) {
    const std::string name = module + ".weight";
    const auto kept = options_.weights_before.find(name);
    const at::Tensor whole = shared(reference_ ? reference_->find(module)->weight : at::Tensor());
    const at::Tensor before =
        shared(kept != options_.weights_before.end() ? kept->second.to(at::kDouble) : at::Tensor());
    if (!whole.defined()) return std::nullopt;
    const auto* seen = mine_.find(module);
    SuspectValue value;
    std::vector<std::int64_t> offset;
    if (seen && (seen->*which).defined()) {
      value = suspect_part(seen->*which, whole, before, seen->shard.get());
      if (seen->shard) offset = seen->shard->box().offsets;
    }
    const bool is_forward = which == &ForwardTrace::ModuleRecord::weight;
    return judge(value, {.offset = offset}, whole.norm().item<double>(), options_.weight_tolerance,
                 is_forward ? "weight in use" : "weight in use by the backward pass", name);
  }

  LayoutSide& parallelized_;
  LayoutSide* reference_side_;  // on the rank with the reference
  Communicator& world_;
  const LayoutPathOptions& options_;
  Path mine_;
  std::unique_ptr<Path> reference_;
  std::vector<std::unique_ptr<Path>> spent_;
  std::string next_;  // the module that the reference uses after the current one
};

}  // namespace

LayoutPath find_origin(LayoutSide& parallelized, LayoutSide* reference, Communicator& world,
                       const LayoutPathOptions& options) {
  return Search(parallelized, reference, world, options).run();
}

}  // namespace phalanx::verify
