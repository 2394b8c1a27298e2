#include "phalanx/parallel/tensor/layout.h"

#include <fmt/format.h>

#include "phalanx/base/error.h"
#include "phalanx/parallel/tensor/functional_collectives.h"

namespace phalanx {
namespace {

using Kind = ActivationLayout::Kind;

bool is_convertible(const ActivationLayout& from, const ActivationLayout& to) {
  if (from == to) return true;
  switch (from.kind) {
    case Kind::replicated:
      return to.kind == Kind::shared || to.kind == Kind::split;
    case Kind::partial:
      return true;
    case Kind::split:
      return to.kind == Kind::shared || to.kind == Kind::replicated;
    case Kind::shared:
      return false;
  }
  return false;
}

}  // namespace

std::string ActivationLayout::text() const {
  switch (kind) {
    case Kind::replicated:
      return "replicated";
    case Kind::shared:
      return "shared";
    case Kind::partial:
      return "partial";
    case Kind::split:
      return fmt::format("split({})", dim);
  }
  return "?";
}

void check_conversion(const std::string& what, const ActivationLayout& from, const ActivationLayout& to) {
  if (is_convertible(from, to)) return;
  throw ConfigError(
      fmt::format("{}: nothing turns {} into {}: expected partial to any other, replicated to shared or split, or "
                  "split to shared or replicated",
                  what, from.text(), to.text()));
}

at::Tensor convert(const at::Tensor& x, const ActivationLayout& from, const ActivationLayout& to,
                   const std::shared_ptr<Communicator>& group,
                   const std::shared_ptr<WeightGradientQueue>& overlap_queue) {
  if (from == to) return x;
  check_conversion("convert", from, to);
  switch (from.kind) {
    case Kind::replicated:
      return to.kind == Kind::shared ? copy_to_group(x, group, overlap_queue) : scatter_to_group(x, to.dim, group);
    case Kind::split:
      return to.kind == Kind::shared ? all_gather_along(x, from.dim, group, overlap_queue)
                                     : gather_from_group(x, from.dim, group);
    default:  // partial
      if (to.kind == Kind::split) return reduce_scatter_along(x, to.dim, group);
      return to.kind == Kind::shared ? copy_to_group(reduce_from_group(x, group), group, overlap_queue)
                                     : reduce_from_group(x, group);
  }
}

}  // namespace phalanx
