#include "phalanx/models/image_nets.h"

#include <ATen/ops/log_softmax.h>
#include <ATen/ops/max_pool2d.h>
#include <ATen/ops/relu.h>

#include <cmath>

namespace phalanx::models {
namespace {

// With a bias and torch's initialisation.
std::shared_ptr<nn::Linear> image_linear(std::int64_t in, std::int64_t out, nn::TensorOptionsOfModule tensor) {
  auto layer = std::make_shared<nn::Linear>(nn::LinearOptions{in, out, /*bias=*/true}, tensor);
  const double bound = 1.0 / std::sqrt(static_cast<double>(in));
  for (const char* name : {"weight", "bias"}) layer->set_init(name, Init::uniform(-bound, bound));
  return layer;
}

}  // namespace

CifarNet::CifarNet(nn::TensorOptionsOfModule tensor) : Module("CifarNet") {
  conv1 = register_module("conv1", std::make_shared<nn::Conv2d>(nn::Conv2dOptions{3, 16, 3, 1}, tensor));
  conv2 = register_module("conv2", std::make_shared<nn::Conv2d>(nn::Conv2dOptions{16, 32, 3, 1}, tensor));
  fc1 = register_module("fc1", image_linear(2048, 64, tensor));
  fc2 = register_module("fc2", image_linear(64, 10, tensor));
}

at::Tensor CifarNet::forward(const at::Tensor& x) {
  at::Tensor y = at::max_pool2d(at::relu(nn::call(conv1, x)), 2);  // [batch, 16, 16, 16]
  y = at::max_pool2d(at::relu(nn::call(conv2, y)), 2);             // [batch, 32, 8, 8]
  y = at::relu(nn::call(fc1, y.flatten(1)));                       // [batch, 64]
  return nn::call(fc2, y);
}

std::vector<std::vector<nn::Module*>> CifarNet::shard_units() {
  return {{conv1.get()}, {conv2.get()}, {fc1.get()}, {fc2.get()}};
}

MnistNet::MnistNet(nn::TensorOptionsOfModule tensor) : Module("MnistNet") {
  conv1 = register_module("conv1", std::make_shared<nn::Conv2d>(nn::Conv2dOptions{1, 32, 3}, tensor));
  conv2 = register_module("conv2", std::make_shared<nn::Conv2d>(nn::Conv2dOptions{32, 64, 3}, tensor));
  dropout1 = register_module("dropout1", std::make_shared<nn::Dropout>(0.25));
  dropout2 = register_module("dropout2", std::make_shared<nn::Dropout>(0.5));
  fc1 = register_module("fc1", image_linear(9216, 128, tensor));
  fc2 = register_module("fc2", image_linear(128, 10, tensor));
}

at::Tensor MnistNet::forward(const at::Tensor& x) {
  at::Tensor y = at::relu(nn::call(conv1, x));                    // [batch, 32, 26, 26]
  y = at::relu(nn::call(conv2, y));                               // [batch, 64, 24, 24]
  y = nn::call(dropout1, at::max_pool2d(y, 2));                   // [batch, 64, 12, 12]
  y = nn::call(dropout2, at::relu(nn::call(fc1, y.flatten(1))));  // [batch, 128]
  return at::log_softmax(nn::call(fc2, y), /*dim=*/1);
}

std::vector<std::vector<nn::Module*>> MnistNet::shard_units() {
  return {{conv1.get()}, {conv2.get()}, {fc1.get()}, {fc2.get()}};
}

}  // namespace phalanx::models
