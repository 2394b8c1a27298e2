// The folder of a batch job: what makes it the same job, the results as they come, and the file of all in the end.
// Knows no tensor.
//
//   FOLDER/job.json            what the results depend on, by content; a folder of another job is refused
//   FOLDER/part-00003.jsonl    of rank 3, a line for each result as soon as it is there: {"index": 7, "record": {...}}
//   FOLDER/FINAL               the records in the order of the prompts, when all are there
//
// After a crash the same command goes on: results that a part file has whole are not computed again, by however many
// ranks. All ranks must see the same folder.
//
//   BatchJob job("answers");
//   job.open(description);                                     // one rank; then, behind a barrier, all:
//   const std::vector<bool> done = job.finished(prompts);
//   job.begin(rank);                                           // behind another barrier
//   job.add(index, record);
//   job.merge(prompts, "results.jsonl");                       // one rank, behind a last one
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <set>
#include <string>
#include <vector>

#include "phalanx/base/file.h"

namespace phalanx::infer {

class BatchJob {
 public:
  explicit BatchJob(std::filesystem::path folder, FileSystem& files = posix_file_system());

  /// Makes the folder, or finds the job in it. DataError if it is another: names every part of the description that
  /// differs, with both values. Returns the parts that could not be compared, because the version of Phalanx that began
  /// the job did not write them; from now on they are. Sampled answers of that version are a DataError: their seeds
  /// were others.
  std::vector<std::string> open(const nlohmann::json& description);
  /// By prompt, whether there is a result. DataError names a line that is no result of this job. The last line of a
  /// part, if its rank was stopped while it wrote, counts as not written.
  std::vector<bool> finished(std::size_t prompts) const;
  /// Begins this rank's part, or goes on with it.
  void begin(int rank);
  void add(std::size_t index, const nlohmann::ordered_json& record);
  /// Writes the file of all, whole or not at all. DataError names the first prompt that has no result and is none of
  /// those to be `skipped`.
  void merge(std::size_t prompts, const std::string& name, const std::set<std::size_t>& skipped = {}) const;

 private:
  std::vector<std::filesystem::path> parts() const;

  std::filesystem::path folder_;
  FileSystem& files_;
  std::unique_ptr<WritableFile> part_;
};

}  // namespace phalanx::infer
