// BatchJob manages the folder of a batch job: what identifies the job, the results as they arrive, and the final file.
// It does not use torch.
//
//   FOLDER/job.json            what the results depend on, by content; a folder of another job is refused
//   FOLDER/part-00003.jsonl    of rank 3, a line for each result as soon as it exists: {"index": 7, "record": {...}}
//   FOLDER/FINAL               the records in the order of the prompts, when all exist
//
// After a crash the same command continues, with any number of ranks: results that are complete in a part file are not
// computed again. All ranks must see the same folder.
//
//   BatchJob job("answers");
//   job.open(description);                                     // on one rank; after a barrier, on all ranks:
//   const std::vector<bool> done = job.finished(prompts);
//   job.begin(rank);                                           // after another barrier
//   job.add(index, record);
//   job.merge(prompts, "results.jsonl");                       // on one rank, after a last barrier
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

  /// Creates the folder, or finds the job in it. Throws DataError if it is another job: names every part of the
  /// description that differs, with both values. Returns the parts that could not be compared, because the version of
  /// Phalanx that began the job did not write them; they are written now. Sampled answers of that version are a
  /// DataError, because their seeds were different.
  std::vector<std::string> open(const nlohmann::json& description);
  /// By prompt, whether there is a result. Throws DataError that names a line that is not a result of this job. An
  /// incomplete last line of a part, whose rank was stopped while writing, is ignored.
  std::vector<bool> finished(std::size_t prompts) const;
  /// Begins or continues this rank's part.
  void begin(int rank);
  void add(std::size_t index, const nlohmann::ordered_json& record);
  /// Writes the file of all results, completely or not at all. Throws DataError that names the first prompt that has no
  /// result and is not in `skipped`.
  void merge(std::size_t prompts, const std::string& name, const std::set<std::size_t>& skipped = {}) const;

 private:
  std::vector<std::filesystem::path> parts() const;

  std::filesystem::path folder_;
  FileSystem& files_;
  std::unique_ptr<WritableFile> part_;
};

}  // namespace phalanx::infer
