// Phalanx in one header: the stable public headers, by what they are for. Each may be included by itself, which
// compiles faster. All other headers are internal and may change in any release.
//
//   #include <torch/torch.h>
//   #include "phalanx/phalanx.h"
//
//   int main() {
//     const phalanx::ProcessContext context = phalanx::init_from_environment();
//     torch::nn::Linear model(16, 1);
//     phalanx::DistributedDataParallel ddp(*model, context.world);
//   }
#pragma once

// Errors, version.
#include "phalanx/base/error.h"
#include "phalanx/base/version.h"

// Ranks that communicate: collectives and messages; ranks as threads, for tests.
#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/comm/backends/local_shm/shared_tensors.h"
#include "phalanx/comm/communicator.h"
#include "phalanx/comm/hierarchical/hierarchical.h"
#include "phalanx/comm/work.h"

// Starting: who this rank is, and its world.
#include "phalanx/launch/process_context.h"
#include "phalanx/launch/spawn.h"
#include "phalanx/launch/supervisor/worker_report.h"

// Degrees of parallelism, meshes, where each element of a tensor lives.
#include "phalanx/layout/parallel_plan.h"
#include "phalanx/mesh/device_mesh.h"
#include "phalanx/tensor/shard_spec.h"
#include "phalanx/tensor/train_state.h"

// Layers that can be sharded, and their initial values.
#include "phalanx/nn/attention.h"
#include "phalanx/nn/embedding.h"
#include "phalanx/nn/init.h"
#include "phalanx/nn/linear.h"
#include "phalanx/nn/module.h"
#include "phalanx/nn/rms_norm.h"

// Optimizers that know shards.
#include "phalanx/optim/adadelta.h"
#include "phalanx/optim/adamw.h"
#include "phalanx/optim/grad_norm.h"
#include "phalanx/optim/lion.h"
#include "phalanx/optim/loss_scaler.h"
#include "phalanx/optim/lr_schedule.h"
#include "phalanx/optim/muon.h"
#include "phalanx/optim/optimizer_set.h"
#include "phalanx/optim/sgd.h"
#include "phalanx/optim/weight_average.h"

// Forms of parallelism.
#include "phalanx/parallel/activation_checkpoint.h"
#include "phalanx/parallel/ddp/data_parallel.h"
#include "phalanx/parallel/ddp/ddp.h"
#include "phalanx/parallel/fsdp/fully_shard.h"
#include "phalanx/parallel/pipeline/pipeline_runtime.h"
#include "phalanx/parallel/pipeline/sequential_pipeline.h"
#include "phalanx/parallel/pipeline/split_sequential.h"
#include "phalanx/parallel/redistribute.h"
#include "phalanx/parallel/replica_check.h"
#include "phalanx/parallel/tensor/styles.h"

// Models, data, checkpoints, training, inference.
#include "phalanx/checkpoint/checkpoint_manager.h"
#include "phalanx/checkpoint/weights.h"
#include "phalanx/data/data_loader.h"
#include "phalanx/data/token_file.h"
#include "phalanx/infer/generator.h"
#include "phalanx/models/llama.h"
#include "phalanx/models/llama_parallel.h"
#include "phalanx/train/trainer.h"
