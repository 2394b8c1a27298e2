// A safetensors file: its header, and the offsets of a checkpoint's shards in its metadata.
#include "phalanx/checkpoint/files/safetensors.h"
#include "phalanx/checkpoint/files/shard_plan.h"
#include "tests/fuzz/fuzz.h"

using namespace phalanx;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return fuzz::parse([&] {
    const auto header = safetensors::parse_header(fuzz::kFile, std::as_bytes(std::span(data, size)), size);
    for (const auto& tensor : header.tensors) {
      fuzz::require(tensor.begin <= tensor.end && tensor.end <= size - header.data_begin, "tensors lie in the file");
    }
    const auto again = safetensors::make_header(header.tensors, header.metadata);
    std::string text = safetensors::format_header(again);
    text.resize(text.size() + size - header.data_begin);
    const auto read = safetensors::parse_header(fuzz::kFile, std::as_bytes(std::span(text)), text.size());
    fuzz::require(read.tensors.size() == header.tensors.size(), "what is written is read");
    fuzz::require(read.metadata == header.metadata, "metadata come back");
    parse_saved_offsets(fuzz::kFile, header);
  });
}
