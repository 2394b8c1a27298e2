// The small classifiers and their batches: the same on one device, on replicas, and sharded, including dropout.
#include "phalanx/models/image_nets.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/nll_loss.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/mesh/device_mesh.h"
#include "phalanx/models/image_batch.h"
#include "phalanx/nn/init.h"
#include "phalanx/optim/adadelta.h"
#include "phalanx/optim/sgd.h"
#include "phalanx/parallel/ddp/data_parallel.h"
#include "phalanx/parallel/ddp/ddp.h"
#include "phalanx/parallel/fsdp/fully_shard.h"

namespace phalanx {
namespace {

data::ImageSet few_images(data::ImageKind kind, std::int64_t count) {
  return data::synthetic_images({.like = kind, .count = count, .seed = 2}, data::ImageSplit::train);
}

TEST(ImageNets, HaveTheParametersTheyAreKnownFor) {
  std::int64_t cifar = 0, mnist = 0;
  for (const auto& p : models::CifarNet().parameters()) cifar += p.numel();
  for (const auto& p : models::MnistNet().parameters()) mnist += p.numel();
  EXPECT_EQ(cifar, 136'874);
  EXPECT_EQ(mnist, 1'199'882);
  models::MnistNet net;
  nn::initialise(net, 1);
  net.eval();
  const models::ImageLoader loader({.global_batch = 5}, few_images(data::ImageKind::mnist, 5));
  const at::Tensor y = nn::call(net, loader.batch(0, 0).images);
  ASSERT_EQ(y.sizes(), at::IntArrayRef({5, 10}));
  EXPECT_TRUE(y.exp().sum(1).sub(1).abs().max().item<double>() < 1e-6);  // log-probabilities
  EXPECT_LE(net.fc1->weight.abs().max().item<double>(), 1.0 / 96);       // 1 / sqrt(9216)
  EXPECT_GT(net.fc1->bias.abs().max().item<double>(), 0.5 / 96);
}

TEST(ImageBatches, AreAFunctionOfSeedEpochAndStepWhateverTheRanks) {
  data::ImageSet set{1, 1, 2, {0, 255, 51, 102, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, {0, 1, 2, 3, 4, 5, 6}};
  const models::ImageLoader plain({.global_batch = 2, .shuffle = false, .mean = 0.2, .deviation = 0.5}, set);
  EXPECT_EQ(plain.steps_per_epoch(), 3);
  EXPECT_LE(plain.batch(0, 0).images.flatten().sub(at::tensor({-0.4F, 1.6F, 0.0F, 0.4F})).abs().max().item<float>(),
            1e-6F);

  const models::ImageLoader all({.global_batch = 4, .seed = 3, .drop_last = false}, set);
  EXPECT_EQ(all.steps_per_epoch(), 2);
  std::set<std::int64_t> seen;
  for (int step = 0; step < 2; ++step) {
    const auto whole = all.batch(1, step);
    EXPECT_EQ(whole.labels.size(0), step == 0 ? 4 : 3);
    EXPECT_EQ(all.rows(step), whole.labels.size(0));
    for (std::int64_t i = 0; i < whole.labels.size(0); ++i) seen.insert(whole.labels[i].item<std::int64_t>());
    std::vector<at::Tensor> images, labels;
    for (int rank = 0; rank < 4; ++rank) {
      const models::ImageLoader part({.global_batch = 4, .rank = rank, .ranks = 4, .seed = 3, .drop_last = false}, set);
      const auto mine = part.batch(1, step);
      EXPECT_EQ(mine.first_row, rank);
      images.push_back(mine.images);
      labels.push_back(mine.labels);
    }
    EXPECT_TRUE(at::equal(at::cat(images), whole.images));
    EXPECT_TRUE(at::equal(at::cat(labels), whole.labels));
  }
  EXPECT_EQ(seen.size(), 7U);
  EXPECT_FALSE(at::equal(all.batch(1, 0).labels, all.batch(2, 0).labels));

  const auto error = [&](models::ImageLoaderOptions options) {
    try {
      models::ImageLoader(options, set);
    } catch (const ConfigError& caught) {
      return std::string(caught.what());
    }
    return std::string();
  };
  EXPECT_THAT(error({.global_batch = 7, .ranks = 3}), HasSubstr("7 images over 3 ranks: expected a multiple of the "
                                                                "number of ranks, such as 6"));
  EXPECT_THAT(error({.global_batch = 8}), HasSubstr("8 images of 7 that there are"));
}

constexpr std::int64_t kImages = 12;

// Losses of the global batches.
std::vector<double> mnist_losses(const std::shared_ptr<Communicator>& world, bool shard, std::int64_t smallest_unit) {
  models::MnistNet net({.without_memory = shard});
  std::unique_ptr<DistributedDataParallel> ddp;
  std::unique_ptr<FullyShardedDataParallel> sharded;
  if (shard) {
    const DeviceMesh mesh(world, {{"dp_shard", world->size()}});
    sharded = std::make_unique<FullyShardedDataParallel>(net, mesh, FullyShardOptions{.smallest_unit = smallest_unit});
    sharded->initialise(1);
    EXPECT_EQ(sharded->units().size(), smallest_unit == 0 ? 4U : 1U);
  } else {
    nn::initialise(net, 1);
    ddp = std::make_unique<DistributedDataParallel>(net, world);
  }
  Adadelta optimizer(shard ? sharded->parameters() : ddp->parameters());
  const models::ImageLoader loader({.global_batch = kImages, .rank = world->rank(), .ranks = world->size(), .seed = 4},
                                   few_images(data::ImageKind::mnist, 4 * kImages));
  std::vector<double> losses;
  for (std::int64_t step = 0; step < 4; ++step) {
    const auto [images, labels, first_row] = loader.batch(0, step);
    nn::set_dropout_rng_state(net, {.seed = 1, .step = step, .first_row = first_row});
    const at::Tensor loss = at::nll_loss(nn::call(net, images), labels);
    loss.backward();
    optimizer.step(1.0);
    optimizer.zero_grad();
    at::Tensor mean = loss.detach().clone();
    world->all_reduce(mean, {.op = ReduceOp::avg});
    losses.push_back(mean.item<double>());
  }
  return losses;
}

TEST(ImageNets, MnistTrainsAlikeOnOneRankOnManyAndSharded) {
  std::vector<double> alone;
  run_local_ranks(1, [&](const auto& world) { alone = mnist_losses(world, false, 0); });
  EXPECT_NEAR(alone[0], std::log(10.0), 0.3);
  // The mean of shares is rounded differently from the mean of the whole, and Adadelta's first steps magnify the
  // difference.
  const auto check = [&](const std::vector<double>& losses, const std::string& what) {
    for (std::size_t i = 0; i < alone.size(); ++i) EXPECT_NEAR(losses[i], alone[i], 1e-4 * alone[i]) << what << i;
  };
  for (const int ranks : {2, 3}) {
    run_local_ranks(ranks, [&](const auto& world) {
      const auto replicated = mnist_losses(world, false, 0);
      if (world->rank() == 0) check(replicated, "replicated ");
      for (const std::int64_t smallest : {0, 20'000}) {
        EXPECT_EQ(mnist_losses(world, true, smallest), replicated);
      }
    });
  }
}

TEST(ImageNets, CifarTrainsAlikeOnOneDeviceAndOnReplicas) {
  const models::ImageLoader loader({.global_batch = 10, .seed = 4}, few_images(data::ImageKind::cifar10, 60));
  const auto losses_of = [&](models::CifarNet& net, const std::function<at::Tensor(const at::Tensor&)>& forward) {
    nn::initialise(net, 7);
    Sgd optimizer(nn::named_parameters(net), {.momentum = 0.9});
    std::vector<double> losses;
    for (std::int64_t step = 0; step < 6; ++step) {
      const auto batch = loader.batch(0, step);
      const at::Tensor loss = at::cross_entropy_loss(forward(batch.images), batch.labels);
      loss.backward();
      optimizer.step(0.05);
      optimizer.zero_grad();
      losses.push_back(loss.item<double>());
    }
    return losses;
  };
  models::CifarNet alone, net;
  const auto expected = losses_of(alone, [&](const at::Tensor& x) { return nn::call(alone, x); });
  DataParallel parallel(net, {at::kCPU, at::kCPU, at::kCPU}, [] { return std::make_shared<models::CifarNet>(); });
  const auto losses = losses_of(net, [&](const at::Tensor& x) { return parallel.forward(x); });
  for (std::size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(losses[i], expected[i], 1e-5 * expected[i]) << i;
  EXPECT_NE(losses.front(), losses.back());
}

}  // namespace
}  // namespace phalanx
