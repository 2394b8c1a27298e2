// PyTorch's reader of distributed checkpoints over safetensors reads what sharded saves write.
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>

#include "phalanx/base/file.h"
#include "phalanx/base/temp_directory.h"
#include "phalanx/checkpoint/checkpoint_manager.h"
#include "phalanx/checkpoint/files/rewrite.h"
#include "phalanx/checkpoint/testing/sharded_state.h"
#include "phalanx/checkpoint/testing/test_state.h"
#include "phalanx/comm/backends/local_shm/local.h"

namespace phalanx {
namespace {

/// Exit status of a Python program in the environment of the build's torch.
int run_program(const std::filesystem::path& scratch, const std::string& program) {
  write_file(scratch / "program.py", program);
  return std::system((std::string(PHALANX_TEST_PYTHON) + " " + (scratch / "program.py").string()).c_str());
}

constexpr const char* kProbe = R"(import importlib.util as u, sys
sys.exit(not (u.find_spec('torch') and u.find_spec('safetensors') and u.find_spec('numpy')))
)";

// Every element counts on from a first one, in the order of the global tensor.
constexpr const char* kReadAll = R"(
import warnings; warnings.filterwarnings('ignore')
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

for step in ('step-1', 'step-2'):
    reader = HuggingFaceStorageReader(folder + '/' + step)
    saved = reader.read_metadata().state_dict_metadata
    state = {name: torch.full(saved[name].size, -1, dtype=saved[name].properties.dtype) for name in saved}
    assert {name: list(t.shape) for name, t in state.items()} == shapes, state
    dcp.load(state, storage_reader=reader, no_dist=True)
    for name, tensor in state.items():
        expected = torch.arange(first[name], first[name] + tensor.numel(), dtype=torch.float32)
        assert torch.equal(tensor, expected.to(tensor.dtype).reshape(tensor.shape)), (step, name, tensor)
    assert state['model.norm.weight'].dtype == torch.bfloat16

# What consolidate() wrote is plain: no shards, no names of ours but the tensors' own.
from safetensors import safe_open
with safe_open(plain, 'pt') as f:
    assert f.metadata() == {'format': 'pt'}, f.metadata()
    assert sorted('model.' + name for name in f.keys()) == sorted(n for n in shapes if n.startswith('model.'))
    for name in f.keys():
        tensor = f.get_tensor(name)
        assert list(tensor.shape) == shapes['model.' + name] and tensor.dtype == torch.bfloat16
        expected = torch.arange(5, 5 + tensor.numel(), dtype=torch.float32)
        assert torch.equal(tensor, expected.to(tensor.dtype).reshape(tensor.shape)), (name, tensor)
)";

TEST(PythonReader, PutsSavedBoxesTogether) {
  const TempDirectory scratch("python");
  if (run_program(scratch.path(), kProbe) != 0)
    GTEST_SKIP() << "skipped: " << PHALANX_TEST_PYTHON << " lacks torch, safetensors or numpy";
  const auto whole = checkpoint_testing::global_state(5);
  const MeshShape two({{"dp", 2}}), four({{"dp", 2}, {"tp", 2}});
  // Rows cut 3 + 8 by two ranks, and blocks cut both ways by four.
  const Placement uneven{.splits = {{"dp", 0, {3, 8}}}}, blocks{.splits = {{"tp", 1, {5, 1}}, {"dp", 0, {}}}};
  int step = 0;
  for (const auto& [mesh, matrix] : {std::pair{two, uneven}, std::pair{four, blocks}}) {
    ++step;
    run_local_ranks(mesh.size(), [&](const std::shared_ptr<Communicator>& comm) {
      TrainState state{{}, whole.integers};
      for (const auto& named : whole.tensors) {
        const bool is_matrix = named.tensor.dim() >= 2 && named.tensor.numel() > 0;
        state.tensors.push_back(is_matrix ? checkpoint_testing::hold(named, mesh, matrix, comm->rank()) : named);
      }
      CheckpointManager(scratch.path(), {}, comm).save(state, step);
    });
  }
  std::string shapes = "shapes = {", first = "first = {";
  for (const auto& named : whole.tensors) {
    shapes += "'" + named.name + "': [";
    for (const auto size : named.tensor.sizes()) shapes += std::to_string(size) + ",";
    shapes += "],";
    const bool is_moment = named.name.ends_with("exp_avg");
    first += "'" + named.name + "': " + (is_moment ? "12" : "5") + ",";
  }
  SavedState saved(scratch.path() / "step-2");
  const auto plain = scratch.path() / "plain.safetensors";
  consolidate(saved, plain, {.dtype = safetensors::Dtype::bf16});
  const std::string folder = "folder = '" + scratch.path().string() + "'\n" + "plain = '" + plain.string() + "'\n";
  EXPECT_EQ(run_program(scratch.path(), folder + shapes + "}\n" + first + "}\n" + kReadAll), 0);
}

}  // namespace
}  // namespace phalanx
