// The steps that the sections' texts name. Each runs on a Stage, prints, and checks what it shows.
#pragma once

#include "phalanx/lecture/stage.h"

namespace phalanx::lecture {

// why_steps.cc
void spawn_ranks(Stage& stage);
void model_sizes(Stage& stage);
void three_scenarios(Stage& stage);

// machine_steps.cc
void machine_facts(Stage& stage);
void measure_levels(Stage& stage);
void local_or_sent(Stage& stage);
void bytes_and_links(Stage& stage);
void async_and_barrier(Stage& stage);
void send_and_receive(Stage& stage);
void benchmark(Stage& stage);
void benchmark_command(Stage& stage);
void overlap(Stage& stage);

// job_steps.cc
void read_environments(Stage& stage);

// collective_steps.cc
void draw_collectives(Stage& stage);
void run_collectives(Stage& stage);
void ring_steps(Stage& stage);
void tree_steps(Stage& stage);
void draw_trees(Stage& stage);
void cost_models(Stage& stage);

// data_parallel_steps.cc
void one_step_by_hand(Stage& stage);
void three_ways(Stage& stage);
void data_parallel_traffic(Stage& stage);
void data_parallel_memory(Stage& stage);
void uneven_means(Stage& stage);
void zero3_moments(Stage& stage);
void zero_stages(Stage& stage);

// model_parallel_steps.cc
void tensor_moments(Stage& stage);
void columns_and_rows(Stage& stage);
void tensor_parallel_training(Stage& stage);
void sequence_moments(Stage& stage);
void sequence_parallel(Stage& stage);
void draw_strategies(Stage& stage);
void mesh_training(Stage& stage);
void split_inference(Stage& stage);

// pipeline_steps.cc
void draw_schedules(Stage& stage);
void naive_pipeline(Stage& stage);
void pipeline_training(Stage& stage);

}  // namespace phalanx::lecture
