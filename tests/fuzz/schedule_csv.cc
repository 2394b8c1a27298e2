// A pipeline schedule as CSV, then what is done with any schedule that was read.
#include "phalanx/schedule/schedule_text.h"
#include "phalanx/schedule/validate.h"
#include "tests/fuzz/fuzz.h"

using namespace phalanx;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return fuzz::parse([&] {
    const auto schedule = schedule::parse_csv(fuzz::text_of(data, size), {.name = "fuzz", .file = fuzz::kFile});
    const std::string text = schedule::to_csv(schedule);
    fuzz::require(schedule::to_csv(schedule::parse_csv(text, {.name = "fuzz", .file = fuzz::kFile})) == text,
                  "what is written is read");
    schedule::to_table(schedule);
    schedule::validate(schedule);
  });
}
