// What a pipeline posts over a backend without tags: the program that schedule::check_deadlock() has checked, and an
// error if that would wait forever.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "phalanx/base/testing/matchers.h"
#include "phalanx/comm/testing/nccl_ranks.h"
#include "phalanx/parallel/pipeline/pipeline_runtime.h"
#include "phalanx/parallel/pipeline/stage_p2p.h"
#include "phalanx/parallel/pipeline/testing/pipeline_test_support.h"
#include "phalanx/schedule/actions.h"
#include "phalanx/schedule/deadlock_check.h"
#include "phalanx/schedule/generators.h"
#include "phalanx/schedule/posting.h"
#include "phalanx/schedule/schedule_text.h"
#include "phalanx/schedule/transfers.h"

namespace phalanx {
namespace {

using namespace std::chrono_literals;
using pipeline_testing::errors_of;
using pipeline_testing::Layers;
using pipeline_testing::Over;
using pipeline_testing::random_rows;
using pipeline_testing::stages_of;
using schedule::Action;
using schedule::ActionKind;
using schedule::Program;
using schedule::Schedule;

Schedule placed(const std::string& name, int ranks, int micro_batches) {
  return schedule::add_transfers(
      schedule::make_schedule({.name = name, .ranks = ranks, .micro_batches = micro_batches}));
}

int peer_of_transfer(const Schedule& plan, const Action& transfer) {
  return schedule::rank_of(plan, schedule::other_end(transfer).stage);
}

// As FakeNccl logs it: "group(send 1, recv 1)".
std::vector<std::string> calls_of(const Schedule& plan, const Program& program) {
  std::vector<std::string> calls;
  for (const auto& step : program) {
    if (step.transfers.empty()) continue;
    std::string text;
    for (const Action& transfer : step.transfers) {
      text += (text.empty() ? "" : ", ") + std::string(schedule::is_send(transfer.kind) ? "send " : "recv ") +
              std::to_string(peer_of_transfer(plan, transfer));
    }
    calls.push_back("group(" + text + ")");
  }
  return calls;
}

TEST(PipelineOverNccl, TheProgramIsPostedAndNothingElse) {
  for (const char* name : {"1F1B", "Interleaved1F1B", "ZBVZeroBubble"}) {
    SCOPED_TRACE(name);
    const Schedule plan = placed(name, 2, 4);
    EXPECT_EQ(
        run_nccl_threads(
            2,
            [&](const NcclRank& rank) {
              const int me = rank.comm->rank();
              PipelineRuntime pipeline(rank.comm, plan, stages_of(plan, me, Layers::own));
              const auto program = [&](const Schedule& schedule) {
                return schedule::post(schedule, schedule::posting_for(false))[static_cast<std::size_t>(me)];
              };
              const std::string other = std::to_string(1 - me);
              std::vector<std::string> expected{"init", "group(send " + other + ", recv " + other + ")"};  // to connect
              const auto add = [&](const Schedule& schedule) {
                for (auto& call : calls_of(plan, program(schedule))) expected.push_back(call);
                expected.emplace_back("broadcast");  // of the losses
              };
              // Shapes are not among them, either in the first step or in an evaluation.
              pipeline.step(random_rows(8, "x"), random_rows(8, "y"));
              add(plan);
              pipeline.evaluate(random_rows(8, "x"), random_rows(8, "y"));
              add(schedule::forward_only(plan));
              EXPECT_EQ(rank.nccl->calls(), expected);
            }),
        "");
  }
}

// Only the transfers of a program, with small tensors, between connected ranks; passes wait for their inputs.
void run_transfers(const std::shared_ptr<Communicator>& comm, const Schedule& plan, const Program& program) {
  StageP2P(comm, plan, at::kCPU).connect();
  std::map<std::tuple<ActionKind, int, int>, std::pair<Work, at::Tensor>> received;
  std::vector<Work> posted;
  const auto value_of = [](const Action& send) { return 100.0F * send.stage + send.micro_batch; };
  for (const auto& step : program) {
    std::vector<Communicator::P2POp> operations;
    for (const Action& transfer : step.transfers) {
      const bool is_send = schedule::is_send(transfer.kind);
      operations.push_back({.is_send = is_send,
                            .tensor = at::full({8}, is_send ? value_of(transfer) : -1.0F),
                            .peer = peer_of_transfer(plan, transfer)});
    }
    if (!step.transfers.empty()) {
      posted.push_back(comm->batch_isend_irecv(operations, {.async = true}));
      for (std::size_t i = 0; i < operations.size(); ++i) {
        const Action& transfer = step.transfers[i];
        if (operations[i].is_send) continue;
        received[{transfer.kind, transfer.stage, transfer.micro_batch}] = {posted.back(), operations[i].tensor};
      }
      continue;
    }
    const Action& pass = step.action;
    const auto kind = pass.kind == ActionKind::forward ? ActionKind::recv_forward : ActionKind::recv_backward;
    if (pass.kind == ActionKind::backward_weight) continue;
    const auto found = received.find({kind, pass.stage, pass.micro_batch});
    if (found == received.end()) continue;
    found->second.first.wait();
    const Action send = schedule::other_end(schedule::make_action(pass.stage, kind, pass.micro_batch));
    EXPECT_EQ(found->second.second[7].item<float>(), value_of(send));
  }
  for (const Work& work : posted) work.wait();
}

TEST(PipelineOverNccl, ProgramsEndOnTheDoubleAndReceivesAheadHangThere) {
  for (const auto& name : schedule::schedule_names()) {
    SCOPED_TRACE(name);
    const Schedule plan = placed(name, 4, 16);
    const auto programs = schedule::post(plan, schedule::posting_for(/*has_tags=*/false));
    EXPECT_EQ(run_nccl_threads(4,
                               [&](const NcclRank& rank) {
                                 run_transfers(rank.comm, plan, programs[static_cast<std::size_t>(rank.comm->rank())]);
                               }),
              "");
  }
  const Schedule plan = placed("1F1B", 2, 3);
  const auto ahead = schedule::post(plan, {.receives_ahead = 1});
  ASSERT_FALSE(schedule::check_deadlock(plan, ahead).empty());
  const std::string failures =
      run_nccl_threads(2,
                       [&](const NcclRank& rank) {
                         rank.comm->mark_started();
                         run_transfers(rank.comm, plan, ahead[static_cast<std::size_t>(rank.comm->rank())]);
                       },
                       {.communicator = {.timeout = 500ms}});
  EXPECT_THAT(failures, AllOf(HasSubstr("rank 0: "), HasSubstr("rank 1: "), HasSubstr("timed out after ")));
}

TEST(PipelineOverNccl, AnOrderThatWaitsForEverIsAnErrorThatNamesTheCycle) {
  const auto errors = errors_of(
      2,
      [](const std::shared_ptr<Communicator>& comm) {
        const Schedule plan = placed("1F1B", 2, 3);
        PipelineRuntime pipeline(comm, plan, stages_of(plan, comm->rank(), Layers::own), {.receives_ahead = 1});
        pipeline.step(random_rows(6, "x"), random_rows(6, "y"));
      },
      Over::nccl);
  for (const auto& error : errors) {
    EXPECT_THAT(error,
                AllOf(HasSubstr("pipeline: schedule '1F1B' cannot be run over nccl, whose messages have no tags"),
                      HasSubstr("with receives_ahead = 1: "), HasSubstr("deadlock, a cycle of waits: "),
                      HasSubstr("Leave receives_ahead unset")));
  }
}

TEST(PipelineErrors, AGradientThatIsAskedForBeforeItsShapeIsKnown) {
  const auto errors = errors_of(2, [](const std::shared_ptr<Communicator>& comm) {
    const Schedule plan = schedule::parse_csv("0RECV_B0,0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n");
    PipelineRuntime pipeline(comm, plan, stages_of(plan, comm->rank(), Layers::own));
  });
  for (const auto& error : errors) {
    EXPECT_THAT(
        error, HasSubstr("cannot be run over local: rank 0, position 0, 0RECV_B0: "
                         "stage 0 has sent no output before it, whose shape it has: place it later. Leave its SEND and "
                         "RECV actions out"));
  }
}

}  // namespace
}  // namespace phalanx
