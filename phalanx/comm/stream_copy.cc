#include "phalanx/comm/stream_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace phalanx {

std::size_t streamed_part(std::size_t result, std::size_t touched, int ranks, const LastLevelCache& cache) {
  if (result >= kStreamBytes) return result;
  const auto sharers = static_cast<std::size_t>(std::min(ranks, cache.cores));
  const std::size_t room = cache.bytes / 4 * 3 / sharers;
  return room == 0 || touched <= room ? 0 : std::min(result, touched - room);
}

std::size_t streamed_part(std::size_t result, std::size_t touched, int ranks) {
  static const LastLevelCache cache = last_level_cache();
  return streamed_part(result, touched, ranks, cache);
}

#ifdef __x86_64__
namespace {

constexpr std::size_t kStreamStep = 256;  // bytes per iteration: four cache lines
// How far ahead of the loads to prefetch: the processor's own prefetching stops at the end of every page.
constexpr std::size_t kStreamAhead = 1024;

// `to` is aligned to a cache line; bytes is a multiple of kStreamStep.
using StreamLines = void (*)(std::byte* to, const std::byte* from, std::size_t bytes);

inline void stream_prefetch(const std::byte* from) {
  for (std::size_t line = 0; line < kStreamStep; line += 64)
    _mm_prefetch(reinterpret_cast<const char*>(from + line), _MM_HINT_T0);
}

// SSE2: every x86-64 has it. Four stores fill a line, which still leaves the core as one write.
void stream_lines_baseline(std::byte* to, const std::byte* from, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += kStreamStep) {
    stream_prefetch(from + at + kStreamAhead);
    for (std::size_t i = at; i < at + kStreamStep; i += 64) {
      const auto* in = reinterpret_cast<const __m128i*>(from + i);
      auto* out = reinterpret_cast<__m128i*>(to + i);
      const __m128i a = _mm_loadu_si128(in);
      const __m128i b = _mm_loadu_si128(in + 1);
      const __m128i c = _mm_loadu_si128(in + 2);
      const __m128i d = _mm_loadu_si128(in + 3);
      _mm_stream_si128(out, a);
      _mm_stream_si128(out + 1, b);
      _mm_stream_si128(out + 2, c);
      _mm_stream_si128(out + 3, d);
    }
  }
}

__attribute__((target("avx512f"))) void stream_lines_avx512(std::byte* to, const std::byte* from, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += kStreamStep) {
    stream_prefetch(from + at + kStreamAhead);
    const __m512i a = _mm512_loadu_si512(from + at);
    const __m512i b = _mm512_loadu_si512(from + at + 64);
    const __m512i c = _mm512_loadu_si512(from + at + 128);
    const __m512i d = _mm512_loadu_si512(from + at + 192);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), a);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at + 64), b);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at + 128), c);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at + 192), d);
  }
}

void stream_by(StreamLines lines, void* to, const void* from, std::size_t bytes) {
  auto* out = static_cast<std::byte*>(to);
  const auto* in = static_cast<const std::byte*>(from);
  const std::size_t head = std::min(bytes, (64 - reinterpret_cast<std::uintptr_t>(out) % 64) % 64);
  const std::size_t body = (bytes - head) / kStreamStep * kStreamStep;
  const std::size_t tail = bytes - head - body;
  if (head > 0) std::memcpy(out, in, head);
  if (body > 0) {
    lines(out + head, in + head, body);
    // Streaming stores are unordered: not even a release store would wait for them.
    _mm_sfence();
  }
  if (tail > 0) std::memcpy(out + head + body, in + head + body, tail);
}

}  // namespace

void stream_copy(void* to, const void* from, std::size_t bytes) {
  static const StreamLines lines = __builtin_cpu_supports("avx512f") ? &stream_lines_avx512 : &stream_lines_baseline;
  stream_by(lines, to, from, bytes);
}

void stream_copy_baseline(void* to, const void* from, std::size_t bytes) {
  stream_by(&stream_lines_baseline, to, from, bytes);
}
#else
void stream_copy(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

void stream_copy_baseline(void* to, const void* from, std::size_t bytes) { stream_copy(to, from, bytes); }
#endif

}  // namespace phalanx
