#include "phalanx/data/corpus/encode_all.h"

#include <exception>
#include <mutex>
#include <thread>

#include "phalanx/base/error.h"
#include "phalanx/base/start_thread.h"

namespace phalanx::data {

std::vector<std::vector<TokenId>> encode_all(const BpeTokenizer& tokenizer, std::span<const std::string> texts,
                                             const EncodeAllOptions& options) {
  std::vector<std::vector<TokenId>> ids(texts.size());
  std::atomic<std::size_t> next = 0;
  std::exception_ptr error;
  std::mutex error_mutex;
  const auto work = [&] {
    try {
      for (std::size_t i = next++; i < texts.size() && !(options.stop != nullptr && *options.stop); i = next++) {
        tokenizer.encode_to(texts[i], ids[i], {.added_tokens = false});
      }
    } catch (...) {
      const std::lock_guard lock(error_mutex);
      error = std::current_exception();
      next = texts.size();
    }
  };
  std::vector<std::thread> helpers;
  try {
    for (std::int64_t i = 1; i < options.threads; ++i) helpers.push_back(start_thread("tokenizing texts", work));
  } catch (const Error&) {  // no more threads than these: it takes longer
  }
  work();
  for (std::thread& helper : helpers) helper.join();
  if (error) std::rethrow_exception(error);
  return ids;
}

}  // namespace phalanx::data
