// Operators that a device must bring along itself: they make tensors, move data, or change where a tensor's memory is.
#pragma once

#include <torch/library.h>

namespace phalanx::sim_device {

void register_native_operators(torch::Library& library);
void register_attention(torch::Library& library);                  // one fused operator, as on CUDA
void register_variable_length_attention(torch::Library& library);  // flash and memory-efficient, as on CUDA
void register_out_dtype(torch::Library& library);  // products of 16-bit factors in float32, which the CPU does not have
void register_scaled_mm(torch::Library& library);  // products of float8 numbers
void register_grouped_mm(torch::Library& library);  // products of groups of rows, whose ends the device knows

}  // namespace phalanx::sim_device
