#include "phalanx/parallel/tensor/layout.h"

#include <fmt/format.h>

#include "phalanx/base/error.h"
#include "phalanx/parallel/tensor/collective_functions.h"

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
                   const std::shared_ptr<Communicator>& group, const std::shared_ptr<WeightGradientQueue>& meanwhile) {
  if (from == to) return x;
  check_conversion("convert", from, to);
  switch (from.kind) {
    case Kind::replicated:
      return to.kind == Kind::shared ? copy_to_group(x, group, meanwhile) : part_along(x, to.dim, group);
    case Kind::split:
      return to.kind == Kind::shared ? all_gather_along(x, from.dim, group, meanwhile)
                                     : gather_along(x, from.dim, group);
    default:  // partial
      if (to.kind == Kind::split) return reduce_scatter_along(x, to.dim, group);
      return to.kind == Kind::shared ? copy_to_group(sum_over_group(x, group), group, meanwhile)
                                     : sum_over_group(x, group);
  }
}

}  // namespace phalanx
