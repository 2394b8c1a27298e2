// Checks the layout check: a value that is corrupted on its way from rank to rank is found, and the right parameter and
// the fault are named. It combines mutations, classes of parameters and layouts, and a run of the
// tests takes some of them (base/testing/case_sample.h).
#include <fmt/format.h>

#include <chrono>
#include <cstdlib>
#include <optional>
#include <set>
#include <utility>

#include "phalanx/base/testing/case_sample.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/config/layouts.h"
#include "phalanx/train/testing/trainer_test_support.h"
#include "phalanx/verify/testing/layout_mutations.h"

namespace phalanx::verify {
namespace {

struct ParameterClass {
  std::string name;
  std::string parameter;             // a representative of the class
  std::vector<std::string> members;  // how the names of its parameters end
};

const std::vector<ParameterClass>& classes() {
  static const std::vector<ParameterClass> all = {
      {"embedding", "tok_embeddings.weight", {"tok_embeddings.weight"}},
      {"query, key, value", "layers.1.attention.wk.weight", {"wq.weight", "wk.weight", "wv.weight"}},
      {"attention out", "layers.0.attention.wo.weight", {"wo.weight"}},
      {"feed-forward in", "layers.1.feed_forward.w3.weight", {"w1.weight", "w3.weight"}},
      {"feed-forward out", "layers.0.feed_forward.w2.weight", {"w2.weight"}},
      {"norm", "layers.1.ffn_norm.weight", {"norm.weight"}},
      {"output", "output.weight", {"output.weight"}},
      {"tied embedding", "tok_embeddings.weight", {"tok_embeddings.weight"}}};
  return all;
}
constexpr const char* kTied = "tied embedding";
constexpr std::int64_t kLayers = 2, kDim = 64;

/// A delivery of a layer's output between ranks, and the class of that layer.
struct Activation {
  DeliveryKey key;
  std::string class_name;
};

/// In the order in which tensor parallelism with sequence parallelism all-gathers and reduce-scatters in a step.
std::vector<std::string> classes_of_activations() {
  std::vector<std::string> names = {"embedding"};
  for (std::int64_t layer = 0; layer < kLayers; ++layer) {
    for (const char* name : {"query, key, value", "attention out", "feed-forward in", "feed-forward out"}) {
      names.emplace_back(name);
    }
  }
  names.insert(names.end(), {"output", "output", "norm"});  // and what the loss needs; then gradients
  for (std::int64_t layer = 0; layer < kLayers; ++layer) {
    for (const char* name : {"feed-forward out", "norm", "attention out", "norm"}) names.emplace_back(name);
  }
  names.emplace_back("embedding");
  return names;
}

class LayoutMutationsTest : public train::TrainerTest {
 protected:
  struct Case {
    std::string what;
    Mutation mutation = Mutation::dropped;
    std::optional<Site> site;
    std::string parameter;             // must be named
    std::vector<std::string> members;  // or one of these
    int one_rank = 0;
  };

  void run_layout(const std::string& layout) {
    const config::NamedLayout named = config::with_layout(config_of(false), layout, 8);
    for (const bool tied : {false, true}) {
      const config::TrainConfig config = config::with_layout(config_of(tied), layout, 8).config;
      const auto ranks = static_cast<int>(named.ranks);
      LayoutProbe probe(ranks);
      const LayoutCheck clean = check(
          config, ranks, [&](const auto& world) { return probe.recording(world); },
          [&](int rank, std::int64_t step, const auto& parameters) { probe.observe(rank, step, parameters); });
      EXPECT_FALSE(clean.finding) << layout << ": " << clean.finding->text();
      for (const ParameterClass& one : classes()) {
        if ((one.name == kTied) != tied) continue;
        for (const Case& mutant : cases_of(layout, one, probe)) run(config, probe, mutant);
      }
      if (!tied) run_other_data(layout, config, ranks);
    }
  }

  void TearDown() override {
    std::string text = fmt::format("{} mutations found, {} left to make mutations", ran_, left_);
    for (const auto& [reason, count] : excluded_) text += fmt::format("\n  {} excluded: {}", count, reason);
    fmt::print("{}\n", text);
    EXPECT_GT(ran_, 0);
  }

 private:
  config::TrainConfig config_of(bool tied) const {
    return config::parse_config(
        "", "test",
        {"--model.flavor=debug", tied ? "--model.tie_embeddings" : "--model.no-tie_embeddings",
         "--training.dataset_path=" + path("tokens.bin"), "--training.seq_len=32", "--training.local_batch_size=8",
         "--training.global_batch_size=8", "--training.steps=10", "--lr_scheduler.warmup_steps=1",
         "--optimizer.lr=3e-3", "--parallelism.pipeline_parallel_microbatch_size=1",
         // Then full tensors arrive at once, and it is known which they are.
         "--parallelism.no-enable_async_tensor_parallel"});
  }

  void exclude(const std::string& reason, std::int64_t count = 1) { excluded_[reason] += count; }

  /// Rank 0's result; all ranks must agree. `other`: the last rank's configuration, if it differs.
  template <class Way, class Observer>
  LayoutCheck check(const config::TrainConfig& config, int ranks, const Way& way, const Observer& observer,
                    const config::TrainConfig* other = nullptr) const {
    LayoutCheck result;
    std::mutex mutex;
    std::set<std::string> texts;
    run_local_ranks(ranks, [&](const std::shared_ptr<Communicator>& world) {
      const int rank = world->rank();
      LayoutCheck mine = check_layout(
          other && rank + 1 == ranks ? *other : config,
          {.world = world,
           .layout_world = way(world),
           .observer = [&](std::int64_t step,
                           const std::vector<NamedTensor>& parameters) { observer(rank, step, parameters); }},
          {.steps = 2});
      const std::lock_guard lock(mutex);
      texts.insert(mine.finding ? mine.finding->text() : "");
      if (rank == 0) result = std::move(mine);
    });
    EXPECT_EQ(texts.size(), 1U) << *texts.begin();
    return result;
  }

  std::vector<Case> cases_of(const std::string& layout, const ParameterClass& one, const LayoutProbe& probe) {
    std::vector<Case> cases;
    const auto spoil = [&](const Site& site, const std::string& parameter) {
      static const char* const kKinds[] = {"gradient", "weight", "activation"};
      for (const Mutation mutation : all_mutations()) {
        if (mutation == Mutation::initial_value) continue;
        if (mutation == Mutation::previous && site.key.place >= 0) continue;  // one of its kind in a step
        const bool on_one = mutation == Mutation::doubled_on_one || mutation == Mutation::zeroed_on_one;
        const int rank = site.pieces.empty() ? probe.ranks() - 1 : site.pieces.rbegin()->first;
        if (on_one && site.key.verb == Verb::recv) continue;  // each message comes to one rank anyway
        cases.push_back({.what = fmt::format("{}, {}, {} by {} over {}: {}", layout, one.name,
                                             kKinds[static_cast<std::size_t>(site.kind)], name_of(site.key.verb),
                                             site.key.group, name_of(mutation)),
                         .mutation = mutation,
                         .site = site,
                         .parameter = parameter,
                         .members = one.members,
                         .one_rank = rank});
      }
    };
    const std::set<std::string> data_groups = {group_of("dp_replicate", layout), group_of("dp_shard", layout)};
    for (const Site& site : probe.sites_of(one.parameter, data_groups)) spoil(site, one.parameter);
    for (const Site& site : tensor_sites_of(layout, one, probe)) {
      spoil(site, site.kind == Site::Kind::gradient ? one.parameter : "");
    }
    if (const auto site = pipeline_site_of(layout, one, probe)) spoil(*site, "");
    for (const Site& site : tied_sites_of(layout, one, probe)) spoil(site, one.parameter);
    if (cases.empty()) exclude(fmt::format("under {} no rank sends anything of {}", layout, one.name));
    const int holder = last_holder_of(one.parameter, probe);
    cases.push_back({.what = fmt::format("{}, {}: initial_value", layout, one.name),
                     .mutation = Mutation::initial_value,
                     .parameter = one.parameter,
                     .members = one.members,
                     .one_rank = holder});
    return cases;
  }

  /// The communicator of an axis: if it is the only axis, the world's. Null if the layout does not have the axis.
  static std::string group_of(const std::string& axis, const std::string& layout) {
    int axes = 0;
    for (const char* one : {"dp_replicate=", "dp_shard=", "tp=", "pp="}) {
      axes += layout.find(one) != std::string::npos ? 1 : 0;
    }
    if (layout.find(axis + "=") == std::string::npos) return "no group";
    return axes == 1 ? "world" : axis;
  }

  static int last_holder_of(const std::string& parameter, const LayoutProbe& probe) {
    int holder = 0;
    for (int rank = 0; rank < probe.ranks(); ++rank) {
      if (probe.record(rank).parameters.at(parameter).count > 0) holder = rank;
    }
    return holder;
  }

  /// For each class one activation in the forward pass and one gradient in the backward pass; for norms the sum of
  /// their gradients.
  std::vector<Site> tensor_sites_of(const std::string& layout, const ParameterClass& one, const LayoutProbe& probe) {
    std::vector<Site> sites;
    if (one.name == kTied) return sites;  // as the embedding's and the output's
    const auto keys = probe.keys_of(group_of("tp", layout), {Verb::all_gather, Verb::reduce_scatter});
    const auto names = classes_of_activations();
    const bool is_pipeline = !probe.keys_of(group_of("pp", layout), {Verb::recv}).empty();
    if (!keys.empty() && keys.size() != names.size() && !is_pipeline) {
      ADD_FAILURE() << "tensor parallelism gathers and scatters " << keys.size() << " times; expected " << names.size();
    }
    if (is_pipeline && !keys.empty()) exclude("stages gather and scatter in an order of their own: seen under tp=2");
    for (std::size_t i = 0; i < names.size() && !is_pipeline && i < keys.size(); ++i) {
      if (names[i] == one.name) sites.push_back({.kind = Site::Kind::activation, .key = keys[i]});
    }
    if (one.name != "norm") return sites;
    // The gradients of each layer's two norms are summed once, attention_norm first.
    const auto sums = probe.keys_of(group_of("tp", layout), {Verb::all_reduce}, 2 * kDim);
    if (is_pipeline || sums.empty()) return sites;
    EXPECT_EQ(std::ssize(sums), kLayers);
    Site norm{.kind = Site::Kind::gradient, .key = sums[0], .is_final = layout == "tp=2"};  // of layers.1
    for (int rank = 0; rank < probe.ranks(); ++rank) {
      Piece sum{.offset = kDim, .count = kDim, .striking = 5};
      if (norm.is_final) sum.stale = probe.record(rank).parameters.at(one.parameter).first_gradient;
      norm.pieces[rank] = {sum};
    }
    sites.push_back(norm);
    return sites;
  }

  /// Transfers between stages, if a layer of this class produces them.
  static std::optional<Site> pipeline_site_of(const std::string& layout, const ParameterClass& one,
                                              const LayoutProbe& probe) {
    if (probe.keys_of(group_of("pp", layout), {Verb::recv}).empty()) return std::nullopt;
    // The last stage begins with the layer whose norm is its first one.
    const auto& last = probe.record(probe.ranks() - 1).parameters;
    const bool cut_in_a_layer = last.at("layers.1.attention_norm.weight").count == 0;
    const bool is_it = one.name == (cut_in_a_layer ? "attention out" : "feed-forward out");
    if (!is_it) return std::nullopt;
    return Site{.kind = Site::Kind::activation, .key = {group_of("pp", layout), Verb::recv, -1}};
  }

  /// The first stage has a copy of the last stage's tied embedding: it receives its values, and sends its gradient.
  static std::vector<Site> tied_sites_of(const std::string& layout, const ParameterClass& one,
                                         const LayoutProbe& probe) {
    std::map<DeliveryKey, Site> sites;
    const std::int64_t count = probe.record(probe.ranks() - 1).parameters.at(one.parameter).count;
    for (int rank = 0; rank < probe.ranks() && one.name == kTied; ++rank) {
      const auto& p = probe.record(rank).parameters.at(one.parameter);
      bool has_values = false;
      for (const auto& d : probe.record(rank).delivered) {
        if (d.key.group != group_of("pp", layout) || d.key.verb != Verb::recv || d.output_count != count) continue;
        // No optimizer steps the copy: the gradient that comes to it after its values is dropped.
        if (p.count == 0 && std::exchange(has_values, true)) continue;
        Site& site = sites[d.key];
        site.kind = p.count > 0 ? Site::Kind::gradient : Site::Kind::weight;
        site.key = d.key;
        const int half = probe.ranks() / 2;  // of two stages: the same place in the last one
        const auto& owner = probe.record(half + rank % half).parameters.at(one.parameter);
        site.pieces[rank] = {{.count = d.output_count, .striking = owner.striking}};
      }
    }
    std::vector<Site> result;
    for (const auto& [key, site] : sites) result.push_back(site);
    return result;
  }

  bool is_left_out() {
    if (count_++ % kApart == first_) is_due_ = true;
    if (takes_all_cases() || is_due_) return false;
    ++left_;
    return true;
  }

  void run(const config::TrainConfig& config, const LayoutProbe& probe, const Case& mutant) {
    if (is_left_out()) return;
    SCOPED_TRACE(mutant.what);
    Spoiler spoiler(probe, mutant.site.value_or(Site{.key = {.group = "none"}}), mutant.mutation, mutant.one_rank);
    const LayoutCheck found = check(
        config, probe.ranks(), [&](const auto& world) { return spoiler.spoiling(world); },
        [&](int rank, std::int64_t step, const auto& parameters) {
          spoiler.observe(rank, step);
          if (step == 0 && mutant.mutation == Mutation::initial_value && rank == mutant.one_rank) {
            for (const NamedTensor& p : parameters) {
              if (p.name == mutant.parameter) *p.tensor.template data_ptr<float>() += 0.25F;
            }
          }
        });
    if (mutant.site && !spoiler.has_changed()) {
      EXPECT_FALSE(found.finding) << found.finding->text();
      return exclude(mutant.mutation == Mutation::wrong_group
                         ? "there is no other group, or it has the same values"
                         : "it makes no difference there: the values are the same");
    }
    if (!found.finding && mutant.site && mutant.site->is_for_backward && mutant.parameter == "tok_embeddings.weight") {
      return exclude("an embedding is gathered for the backward pass, which does not read it");
    }
    if (!found.finding) {
      ADD_FAILURE() << "not found";
      return;
    }
    ++ran_;
    is_due_ = false;
    judge(*found.finding, mutant);
    if (std::getenv("PHALANX_SHOW_MUTATIONS")) fmt::print("{}\n  {}\n", mutant.what, found.finding->text());
  }

  static void judge(const LayoutFinding& finding, const Case& mutant) {
    const bool is_member =
        std::ranges::any_of(mutant.members, [&](const std::string& end) { return finding.parameter.ends_with(end); });
    const bool is_passing = finding.cause.find("differs from run to run") != std::string::npos;
    EXPECT_TRUE(is_passing || mutant.mutation != Mutation::once) << finding.text();
    // The previous contents of the memory are not the same each time either.
    if (is_passing && (mutant.mutation == Mutation::once || mutant.mutation == Mutation::dropped)) return;
    EXPECT_TRUE(mutant.parameter.empty() ? is_member : finding.parameter == mutant.parameter) << finding.text();
    EXPECT_FALSE(finding.cause.empty());
    if (mutant.mutation == Mutation::initial_value) {
      EXPECT_EQ(finding.what, "initial value");
      EXPECT_EQ(finding.rank, mutant.one_rank);
      return;
    }
    EXPECT_EQ(finding.step, 2);
    if (mutant.site->kind == Site::Kind::weight) {
      EXPECT_THAT(finding.what, StartsWith("weight in use")) << finding.text();
    }
    const bool is_value = mutant.site->is_final || mutant.site->kind == Site::Kind::weight;
    if (!is_value) return;
    const std::map<Mutation, std::string> causes = {{Mutation::doubled, "2 times too large|twice as large"},
                                                    {Mutation::halved, "2 times too small|0.5 times"},
                                                    {Mutation::negated, "wrong sign"},
                                                    {Mutation::stale, "stale"},
                                                    {Mutation::zeroed, "it is zero|are wrong"},
                                                    // One of each part, where two ranks get one each.
                                                    {Mutation::one_element, "one element of|likely cause: 2 elements"},
                                                    {Mutation::not_finite, "not finite"}};
    const auto cause = causes.find(mutant.mutation);
    if (cause != causes.end()) {
      EXPECT_THAT(finding.text(), ContainsRegex(cause->second));
    }
    if (mutant.mutation == Mutation::dropped && mutant.site->key.verb == Verb::all_reduce) {
      EXPECT_THAT(finding.cause, AnyOf(HasSubstr("not summed over dp_replicate"), HasSubstr("not summed over tp")));
    }
    const bool on_one = mutant.mutation == Mutation::doubled_on_one || mutant.mutation == Mutation::zeroed_on_one;
    if (on_one) {
      EXPECT_EQ(finding.rank, mutant.one_rank) << finding.text();
    }
  }

  /// One rank reads another file.
  void run_other_data(const std::string& layout, const config::TrainConfig& config, int ranks) {
    if (is_left_out()) return;
    SCOPED_TRACE(layout + ": other data on one rank");
    write_tokens("other.bin", std::vector<std::uint16_t>(6000, 7));
    config::TrainConfig other = config;
    other.training.dataset_path = path("other.bin");
    const LayoutCheck found = check(
        config, ranks, [](const auto& world) { return world; }, [](int, std::int64_t, const auto&) {}, &other);
    ++ran_;
    is_due_ = false;
    ASSERT_TRUE(found.finding);
    EXPECT_EQ(found.finding->what, "batch") << found.finding->text();
    EXPECT_EQ(found.finding->rank, ranks - 1) << found.finding->text();
    EXPECT_THAT(found.finding->cause, HasSubstr("reads other tokens"));
  }

  // Of so many cases one is run; or, where it is excluded, the next one that is not.
  static constexpr std::int64_t kApart = 23;
  const std::int64_t first_ = static_cast<std::int64_t>(sampled_indices(kApart, 1).front());
  bool is_due_ = false;
  std::int64_t count_ = 0, ran_ = 0, left_ = 0;
  std::map<std::string, std::int64_t> excluded_;
};

TEST_F(LayoutMutationsTest, OfReplicas) { run_layout("dp_replicate=2"); }
TEST_F(LayoutMutationsTest, OfZero1) { run_layout("dp_shard=2,zero=1"); }
TEST_F(LayoutMutationsTest, OfZero2) { run_layout("dp_shard=2,zero=2"); }
TEST_F(LayoutMutationsTest, OfZero3) { run_layout("dp_shard=2,zero=3"); }
TEST_F(LayoutMutationsTest, OfReplicatedShards) { run_layout("dp_replicate=2,dp_shard=2,zero=3"); }
TEST_F(LayoutMutationsTest, OfTensorParallelism) { run_layout("tp=2"); }
TEST_F(LayoutMutationsTest, OfShardsOfTensorParallelism) { run_layout("dp_shard=2,tp=2"); }
TEST_F(LayoutMutationsTest, OfAPipeline) { run_layout("pp=2"); }
TEST_F(LayoutMutationsTest, OfAReplicatedPipeline) { run_layout("pp=2,dp_replicate=2"); }
TEST_F(LayoutMutationsTest, OfAPipelineOfShards) { run_layout("pp=2,dp_shard=2"); }
TEST_F(LayoutMutationsTest, OfAPipelineOfTensorParallelism) { run_layout("pp=2,tp=2"); }

}  // namespace
}  // namespace phalanx::verify
