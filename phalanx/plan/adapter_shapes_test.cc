// The planner counts the elements of adapters that a rank's model has.
#include <ATen/core/Tensor.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <memory>

#include "phalanx/comm/backends/local_shm/local.h"
#include "phalanx/mesh/device_mesh.h"
#include "phalanx/models/config/llama_part.h"
#include "phalanx/models/llama.h"
#include "phalanx/models/llama_parallel.h"
#include "phalanx/models/lora.h"
#include "phalanx/plan/memory_model.h"
#include "phalanx/plan/unit_shapes.h"

namespace phalanx::plan {
namespace adapter_shapes_test {

using models::LlamaFamily;

TEST(AdapterShapes, AreThoseOfTheModelOnARank) {
  for (const LlamaFamily family :
       {LlamaFamily::llama, LlamaFamily::deepseek_v2, LlamaFamily::deepseek_v3, LlamaFamily::gpt2, LlamaFamily::phi3}) {
    for (const int ranks : {1, 2}) {
      SCOPED_TRACE(fmt::format("{}, {} ranks", models::family_name(family), ranks));
      models::LlamaConfig config = models::llama_flavor("debug", family);
      config.tie_embeddings = false;
      const models::LoraOptions lora{.rank = 3, .target_modules = {"all-linear", "lm_head"}};
      run_local_ranks(ranks, [&](const std::shared_ptr<Communicator>& world) {
        models::Llama model(config, {.without_memory = true});
        models::add_lora(model, lora);
        models::parallelize_llama(model, DeviceMesh(world, {{"tp", ranks}}));
        std::int64_t elements = 0;
        for (const auto& p : model.named_parameters())
          elements += models::is_lora_name(p.key()) ? p.value().numel() : 0;
        const TrainingShape shape{.model = config, .tensor_parallel_size = ranks, .lora = lora};
        EXPECT_EQ(elements_of_part(shape, models::full_llama(config)).trained, elements);
        EXPECT_GT(elements, 0);
      });
    }
  }
}

}  // namespace adapter_shapes_test
}  // namespace phalanx::plan
