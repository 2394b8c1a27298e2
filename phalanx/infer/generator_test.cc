#include "phalanx/infer/generator.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <set>

#include "phalanx/base/error.h"
#include "phalanx/base/human.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/comm/testing/nccl_ranks.h"
#include "phalanx/data/tokenizer/bpe_model.h"
#include "phalanx/data/tokenizer/bpe_tokenizer.h"
#include "phalanx/infer/testing/part_of_model.h"
#include "phalanx/mesh/device_mesh.h"
#include "phalanx/models/llama.h"
#include "phalanx/models/lora.h"
#include "phalanx/nn/init.h"

namespace phalanx::infer {
namespace {

std::shared_ptr<models::Llama> small_model(std::int64_t vocab = 61) {
  auto model = std::make_shared<models::Llama>(models::LlamaConfig{.dim = 32,
                                                                   .n_layers = 2,
                                                                   .n_heads = 4,
                                                                   .n_kv_heads = 2,
                                                                   .ffn_hidden = 48,
                                                                   .vocab_size = vocab,
                                                                   .max_seq_len = 40});
  nn::initialise(*model, 3);
  // Larger weights, so that the likeliest tokens differ between positions and have clear margins.
  const at::NoGradGuard no_grad;
  for (auto& [name, parameter, shard] : nn::named_parameters(*model))
    if (parameter.dim() == 2) parameter.mul_(30);
  return model;
}

std::vector<std::int64_t> prompt_of(std::size_t length, std::int64_t first) {
  std::vector<std::int64_t> prompt;
  for (std::size_t i = 0; i < length; ++i) prompt.push_back((first + 17 * static_cast<std::int64_t>(i)) % 61);
  return prompt;
}

/// The likeliest continuation by running the whole sequence through the model for each token.
std::vector<std::int64_t> greedy_without_cache(models::Llama& model, std::vector<std::int64_t> tokens, int count) {
  const at::NoGradGuard no_grad;
  std::vector<std::int64_t> result;
  for (int i = 0; i < count; ++i) {
    const auto logits = model.forward(at::tensor(tokens, at::TensorOptions(at::kLong)).unsqueeze(0));
    result.push_back(logits.select(0, 0).select(0, -1).argmax().item<std::int64_t>());
    tokens.push_back(result.back());
  }
  return result;
}

Request greedy_request(std::vector<std::int64_t> prompt, std::int64_t count) {
  return {.prompt = std::move(prompt), .max_new_tokens = count, .sampling = {.temperature = 0}};
}

TEST(Generator, RunsTheModelWithoutDropoutAndPutsItBack) {
  const auto generated = [](double dropout, bool training) {
    const auto model = small_model();
    models::add_lora(*model, {.rank = 2, .dropout = dropout, .zero_b = false});
    nn::initialise(*model, 3);
    model->train(training);
    Generator generator(*model, {});
    const auto tokens =
        generator.generate({{.prompt = prompt_of(4, 3), .max_new_tokens = 8, .sampling = {.temperature = 0.0}}})
            .at(0)
            .tokens;
    EXPECT_EQ(model->is_training(), training);
    return tokens;
  };
  EXPECT_EQ(generated(0.5, /*training=*/true), generated(0, /*training=*/false));
}

TEST(Generator, GreedyEqualsTheWholeModelAtEveryToken) {
  const auto model = small_model();
  Generator generator(*model);
  const auto result = generator.generate({greedy_request(prompt_of(5, 2), 20)});
  const auto expected = greedy_without_cache(*model, prompt_of(5, 2), 20);
  EXPECT_EQ(result[0].tokens, expected);
  EXPECT_GT(std::set<std::int64_t>(expected.begin(), expected.end()).size(), 5u)
      << "the model repeats itself: a weak test";
  EXPECT_EQ(result[0].reason, FinishReason::max_new_tokens);
}

TEST(Generator, PromptsOfUnequalLengthsAndManyBatches) {
  const auto model = small_model();
  for (const GeneratorOptions& options :
       {GeneratorOptions{.max_batch = 8}, {.max_batch = 3}, {.max_batch = 8, .prefill_chunk = 4}}) {
    Generator generator(*model, options);
    std::vector<Request> requests;
    for (std::int64_t i = 0; i < 7; ++i)
      requests.push_back(greedy_request(prompt_of(1 + 3 * i % 13, i), 4 + 5 * i % 9));
    const auto results = generator.generate(requests);
    for (std::size_t i = 0; i < requests.size(); ++i)
      EXPECT_EQ(results[i].tokens,
                greedy_without_cache(*model, requests[i].prompt, static_cast<int>(requests[i].max_new_tokens)))
          << "request " << i << ", batches of " << options.max_batch << ", chunks of " << options.prefill_chunk;
  }
}

TEST(Generator, SampledTokensDoNotDependOnTheBatch) {
  const auto model = small_model();
  std::vector<Request> requests;
  for (std::uint64_t i = 0; i < 5; ++i)
    requests.push_back(
        {.prompt = prompt_of(2 + i, 1), .max_new_tokens = 12, .sampling = {.top_p = 0.9, .seed = 100 + i}});
  Generator generator(*model);
  const auto together = generator.generate(requests);
  for (std::size_t i = 0; i < requests.size(); ++i)
    EXPECT_EQ(generator.generate({requests[i]})[0].tokens, together[i].tokens);
  auto other_seed = requests[0];
  other_seed.sampling.seed = 7;
  EXPECT_NE(generator.generate({other_seed})[0].tokens, together[0].tokens);
}

TEST(Generator, TheDrawOfATokenIsThatOfItsPlaceInTheContinuation) {
  const auto model = small_model();
  const SamplingOptions sampling{.temperature = 2.0, .seed = 11};
  const auto result =
      Generator(*model).generate({{.prompt = prompt_of(4, 1), .max_new_tokens = 10, .sampling = sampling}});
  const at::NoGradGuard no_grad;
  Sampler sampler(sampling, 61);
  auto tokens = prompt_of(4, 1);
  for (std::size_t i = 0; i < 10; ++i) {
    const auto logits =
        model->forward(at::tensor(tokens, at::TensorOptions(at::kLong)).unsqueeze(0))[0][-1].contiguous();
    tokens.push_back(sampler.sample({logits.const_data_ptr<float>(), 61}, i));
    EXPECT_EQ(result[0].tokens[i], tokens.back()) << i;
  }
}

TEST(Generator, StreamsEveryTokenInOrder) {
  const auto model = small_model();
  Generator generator(*model, {.max_batch = 2});
  std::vector<std::vector<std::int64_t>> streamed(3);
  const auto results = generator.generate(
      {greedy_request(prompt_of(6, 2), 9), greedy_request(prompt_of(3, 1), 5), greedy_request(prompt_of(2, 3), 4)},
      [&](std::size_t request, std::int64_t token) { streamed[request].push_back(token); });
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(streamed[i], results[i].tokens);
  EXPECT_EQ(generator.stats().prompt_tokens, 11);
  EXPECT_EQ(generator.stats().decoded_tokens, 5 + 9 + 4 - 3);
}

TEST(Generator, StopTokensEndARequestAndAreLeftOut) {
  const auto model = small_model();
  const auto expected = greedy_without_cache(*model, prompt_of(5, 2), 10);
  Generator generator(*model);
  auto request = greedy_request(prompt_of(5, 2), 10);
  request.stop_tokens = {expected[4], 1000};
  const auto result = generator.generate({request, greedy_request(prompt_of(5, 2), 10)});
  const auto stop = std::find(expected.begin(), expected.end(), expected[4]);  // it may come earlier
  EXPECT_EQ(result[0].tokens, std::vector<std::int64_t>(expected.begin(), stop));
  EXPECT_EQ(result[0].reason, FinishReason::stop_token);
  EXPECT_EQ(result[1].tokens, expected);
}

TEST(Generator, EndsWhereTheModelsLengthEnds) {
  const auto model = small_model();
  Generator generator(*model);
  const auto results =
      generator.generate({greedy_request(prompt_of(30, 1), 100), greedy_request(prompt_of(39, 1), 100)});
  EXPECT_EQ(results[0].tokens, greedy_without_cache(*model, prompt_of(30, 1), 10));
  EXPECT_EQ(results[0].reason, FinishReason::max_seq_len);
  EXPECT_EQ(results[1].tokens.size(), 1u);
}

TEST(Generator, RequestsThatCannotRunAreNamedBeforeAnythingRuns) {
  const auto model = small_model();
  Generator generator(*model, {.max_batch = 1});
  const auto error = [&](Request request) {
    bool ran = false;
    const auto message = error_text([&] {
      generator.generate({greedy_request({1}, 1), std::move(request)}, [&](std::size_t, std::int64_t) { ran = true; });
    });
    EXPECT_FALSE(ran);
    return message;
  };
  EXPECT_THAT(error(greedy_request({}, 1)), HasSubstr("prompt 2: it has no tokens"));
  EXPECT_THAT(error(greedy_request(prompt_of(40, 0), 1)),
              HasSubstr("prompt 2: it has 40 tokens; the model's max_seq_len of 40 leaves room for at most 39"));
  EXPECT_THAT(error(greedy_request({3, 61}, 1)), HasSubstr("token 61 is not in the model's vocabulary of 61"));
  EXPECT_THAT(error(greedy_request({-1}, 1)), HasSubstr("token -1"));
  EXPECT_THAT(error(greedy_request({3}, 0)), HasSubstr("max_new_tokens is 0"));
  EXPECT_THAT(error({.prompt = {1}, .sampling = {.top_p = 2}}), HasSubstr("top_p is 2"));
  EXPECT_THROW(Generator(*model, {.max_batch = 0}), ConfigError);
}

TEST(Generator, AnErrorInTheCallbackLeavesTheGeneratorUsable) {
  const auto model = small_model();
  Generator generator(*model);
  EXPECT_THROW(
      generator.generate({greedy_request({1, 2}, 5)}, [](std::size_t, std::int64_t) { throw Error("enough"); }), Error);
  EXPECT_EQ(generator.generate({greedy_request({1, 2}, 5)})[0].tokens, greedy_without_cache(*model, {1, 2}, 5));
}

/// Requests of unequal lengths, some of them drawn.
std::vector<Request> mixed_requests(std::int64_t count) {
  std::vector<Request> requests;
  for (std::int64_t i = 0; i < count; ++i) {
    requests.push_back(greedy_request(prompt_of(static_cast<std::size_t>(1 + 5 * i % 17), i), 1 + 7 * i % 12));
    if (i % 3 == 1) requests.back().sampling = {.top_p = 0.9, .seed = static_cast<std::uint64_t>(i)};
  }
  return requests;
}

std::vector<std::vector<std::int64_t>> tokens_of(const std::vector<Completion>& completions) {
  std::vector<std::vector<std::int64_t>> tokens;
  for (const auto& completion : completions) tokens.push_back(completion.tokens);
  return tokens;
}

TEST(Generator, AFreeRowTakesTheNextRequestWhileTheOthersGoOn) {
  const auto model = small_model();
  Generator generator(*model, {.max_batch = 2});
  std::vector<std::int64_t> asked;
  std::vector<std::size_t> ended;
  std::vector<Completion> results(4);
  const std::vector<std::int64_t> lengths = {12, 3, 4, 2};
  std::size_t taken = 0;
  generator.run({.next =
                     [&](std::int64_t count) {
                       asked.push_back(count);
                       std::vector<Request> some;
                       for (; std::ssize(some) < count && taken < 4; ++taken) {
                         some.push_back(greedy_request(prompt_of(3 + taken, 1), lengths[taken]));
                       }
                       return some;
                     },
                 .done = [&](std::size_t i, Completion result) { ended.push_back(i), results[i] = std::move(result); },
                 .longest = 20});
  // Rows 1 2 3 follow each other beside row 0, which is the last to end.
  EXPECT_EQ(ended, (std::vector<std::size_t>{1, 2, 3, 0}));
  EXPECT_EQ(asked, (std::vector<std::int64_t>{2, 1, 1, 1}));
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(results[i].tokens, greedy_without_cache(*model, prompt_of(3 + i, 1), static_cast<int>(lengths[i]))) << i;
  }
  EXPECT_THAT(error_text([&] {
                generator.run({.next =
                                   [](std::int64_t) {
                                     return std::vector{greedy_request({1, 2}, 8)};
                                   },
                               .done = [](std::size_t, const Completion&) {},
                               .longest = 9});
              }),
              HasSubstr("prompt 1: it needs 10 positions, and the cache was made for 9"));
  EXPECT_THAT(error_text([&] {
                generator.run({.next =
                                   [](std::int64_t) {
                                     return std::vector(3, greedy_request({1, 2}, 8));
                                   },
                               .done = [](std::size_t, const Completion&) {}});
              }),
              HasSubstr("next() gave 3 requests for 2 free rows"));
}

TEST(Generator, AMemoryBoundMakesBatchesSmallerNotResultsOther) {
  const auto model = small_model();
  const auto requests = mixed_requests(9);
  const auto expected = tokens_of(Generator(*model).generate(requests));
  // Keys and values of a position: 2 x 2 layers x 2 heads x 8 elements x 4 bytes.
  std::int64_t longest = 0;
  for (const Request& request : requests) longest = std::max(longest, Generator(*model).positions_of(request));
  for (const std::int64_t rows : {1, 3}) {
    EXPECT_EQ(tokens_of(Generator(*model, {.cache_bytes = rows * longest * 256}).generate(requests)), expected) << rows;
  }
  EXPECT_THAT(error_text([&] { Generator(*model, {.cache_bytes = longest * 256 - 1}).generate(requests); }),
              HasSubstr(fmt::format("the keys and values of one sequence of {} tokens take {}, and cache_bytes allows",
                                    longest, human_bytes(static_cast<std::uint64_t>(longest * 256)))));
}

TEST(Generator, ARepetitionPenaltyIsThatOfTheSampler) {
  const auto model = small_model();
  Request request = greedy_request(prompt_of(4, 1), 20);
  request.sampling.repetition_penalty = 1e6;  // nothing comes twice
  const auto tokens = Generator(*model).generate({request})[0].tokens;
  std::set<std::int64_t> all(request.prompt.begin(), request.prompt.end());
  all.insert(tokens.begin(), tokens.end());
  EXPECT_EQ(all.size(), 24u);
}

TEST(Generator, AStopStringEndsTheTextBeforeIt) {
  const auto model = small_model();
  data::BpeModel letters;
  for (char letter = 'A'; letter < 'A' + 61; ++letter) letters.tokens.emplace_back(1, letter);
  const data::BpeTokenizer tokenizer(letters);
  const auto plain = greedy_without_cache(*model, prompt_of(5, 2), 12);
  Request request = greedy_request(prompt_of(5, 2), 12);
  EXPECT_THAT(error_text([&] {
                request.stop_strings = {"x"};
                Generator(*model).generate({request});
              }),
              HasSubstr("prompt 1: it has stop strings, but there is no tokenizer"));
  // Two bytes that the model generates one after the other, in the middle of the answer.
  const std::string text = tokenizer.decode(plain);
  request.stop_strings = {"not there", text.substr(6, 2)};
  const std::size_t place = text.find(request.stop_strings[1]);
  const auto result = Generator(*model, {.tokenizer = &tokenizer}).generate({request})[0];
  EXPECT_EQ(result.reason, FinishReason::stop_string);
  EXPECT_EQ(result.text, text.substr(0, place));
  EXPECT_EQ(result.tokens,
            std::vector<std::int64_t>(plain.begin(), plain.begin() + static_cast<std::ptrdiff_t>(place) + 2));
  request.stop_strings = {"not there"};
  EXPECT_EQ(Generator(*model, {.tokenizer = &tokenizer}).generate({request})[0].text, text);
}

// The model over ranks by layers, by tensor parallelism and both: the tokens of one rank.
TEST(Generator, EveryLayoutGivesTheTokensOfOneRank) {
  const auto whole = small_model(64);
  const auto requests = mixed_requests(11);
  const auto expected = tokens_of(Generator(*whole, {.max_batch = 4}).generate(requests));
  for (const auto& [pp, tp] : std::vector<std::pair<int, int>>{{2, 1}, {3, 1}, {1, 2}, {2, 2}}) {
    for (const std::int64_t max_batch : {1, 4, 7}) {
      run_local_ranks(pp * tp, [&](const std::shared_ptr<Communicator>& world) {
        const DeviceMesh mesh(world, {{"pp", pp}, {"tp", tp}});
        const auto model = part_of_model(*whole, mesh);
        Generator generator(*model, {.max_batch = max_batch, .stages = pp > 1 ? mesh.communicator("pp") : nullptr});
        EXPECT_EQ(tokens_of(generator.generate(requests)), expected)
            << pp << " stages, tp " << tp << ", rank " << world->rank() << ", batches of " << max_batch;
      });
    }
  }
  models::Llama part(whole->config(), models::balance_llama(whole->config(), 2, 16)[0]);
  EXPECT_THAT(error_text([&] { const Generator generator(part); }), HasSubstr("the model is a part (embedding"));
}

// A device may run the kernels of all its communicators one after the other. Hidden states that go forward must not
// queue behind tokens that come back.
TEST(Generator, OverNcclADeviceThatRunsOneKernelAtATimeIsEnough) {
  using namespace std::chrono_literals;
  const auto whole = small_model(64);
  const auto requests = mixed_requests(9);
  const auto expected = tokens_of(Generator(*whole, {.max_batch = 4}).generate(requests));
  for (const auto& [pp, tp] : std::vector<std::pair<int, int>>{{2, 1}, {3, 1}, {2, 2}}) {
    for (const std::int64_t max_batch : {1, 7}) {
      const auto body = [&](const NcclRank& rank) {
        const DeviceMesh mesh(rank.comm, {{"pp", pp}, {"tp", tp}});
        const auto model = part_of_model(*whole, mesh);
        Generator generator(*model, {.max_batch = max_batch, .stages = mesh.communicator("pp")});
        EXPECT_EQ(tokens_of(generator.generate(requests)), expected)
            << pp << " stages, tp " << tp << ", rank " << rank.comm->rank() << ", batches of " << max_batch;
      };
      EXPECT_EQ(run_nccl_threads(pp * tp, body, {.communicator = {.first_timeout = 60s, .timeout = 60s}},
                                 FakeStreams::Kernels::one_at_a_time),
                "");
    }
  }
}

TEST(Generator, TheModelCanBeTrainedAfterwards) {
  const auto model = small_model();
  Generator(*model).generate({greedy_request(prompt_of(39, 1), 1)});
  const auto tokens = at::tensor(prompt_of(8, 1), at::TensorOptions(at::kLong)).unsqueeze(0);
  model->loss(tokens, tokens).backward();
  EXPECT_TRUE(model->tok_embeddings->weight.grad().defined());
}

}  // namespace
}  // namespace phalanx::infer
