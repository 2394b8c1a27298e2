// Without NCCL, or without a device: which error is reported, and to which ranks.
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "phalanx/base/error.h"
#include "phalanx/base/testing/error_text.h"
#include "phalanx/base/testing/matchers.h"
#include "phalanx/comm/backends/local_shm/local_backend.h"
#include "phalanx/comm/backends/nccl/nccl.h"
#include "phalanx/comm/backends/nccl/nccl_table.h"
#include "phalanx/comm/device/device_streams.h"

namespace phalanx {
namespace {

TEST(NcclTable, SaysWhyNcclCannotBeLoaded) {
  EXPECT_THAT(error_text<CommError>([&] { load_nccl("libphalanx-has-no-such-library.so.2"); }),
              HasSubstr("NCCL cannot be loaded: libphalanx-has-no-such-library.so.2"));
  EXPECT_THAT(error_text<CommError>([&] { load_nccl("libm.so.6"); }), HasSubstr("libm.so.6 lacks ncclGetVersion, "));
}

TEST(NcclTable, ARankWithoutItIsNamedToAll) {
  if (is_cuda_build() && cuda_device_count() > 0) GTEST_SKIP() << "this machine has a GPU";
  const auto control = make_local_backends(2);
  std::vector<std::thread> threads;
  for (const auto& backend : control)
    threads.emplace_back([&backend] {
      EXPECT_THAT(error_text<CommError>([&] { make_nccl_communicator(backend, 0); }), HasSubstr("rank 0: cuda:0: "));
    });
  for (std::thread& thread : threads) thread.join();
}

TEST(DeviceStreams, CpuBuildsHaveNone) {
  if (is_cuda_build()) GTEST_SKIP() << "this is a CUDA build";
  EXPECT_EQ(cuda_device_count(), 0);
  EXPECT_EQ(cuda_device_name(0), "");
  EXPECT_THROW(make_cuda_streams(0), ConfigError);
}

}  // namespace
}  // namespace phalanx
