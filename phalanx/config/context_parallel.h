// What context parallelism asks of a run. It does not use torch.
#pragma once

#include "phalanx/config/config.h"
#include "phalanx/layout/parallel_plan.h"
#include "phalanx/models/config/llama_config.h"
#include "phalanx/plan/context_exchange.h"

namespace phalanx::config {

/// What attention exchanges in such a run. "auto" is decided here, and the choice says why.
plan::ContextExchangeChoice context_exchange(const TrainConfig& config, const models::LlamaConfig& model,
                                             const ParallelPlan& plan);

/// Whether packed sequences are cut by attention's work, with that exchange, rather than into heads and tails.
bool cuts_by_work(const TrainConfig& config, const ParallelPlan& plan, const plan::ContextExchangeChoice& exchange);

/// Throws ConfigError for what context parallelism cannot do: it names the setting and what to do instead.
void check_context_parallel(const TrainConfig& config, const models::LlamaConfig& model, const ParallelPlan& plan);

}  // namespace phalanx::config
