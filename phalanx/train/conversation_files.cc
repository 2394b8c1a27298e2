#include "phalanx/train/conversation_files.h"

#include <fmt/format.h>

#include <filesystem>
#include <system_error>

#include "phalanx/base/error.h"
#include "phalanx/base/log.h"
#include "phalanx/train/inputs/conversation_data.h"
#include "phalanx/train/ranks/first_rank.h"

namespace phalanx::train {

config::TrainConfig config_of_data(const config::TrainConfig& config, const std::shared_ptr<Communicator>& world,
                                   const ConversationFilesOptions& options) {
  if (!config::trains_on_chats(config)) return config;
  const std::string folder = from_first_rank(*world, [&](const std::function<void()>& still_working) {
    const ConversationData made =
        make_conversation_data(config, {.still_working = still_working, .quiet = options.quiet});
    if (options.log_info) {
      for (const std::string& line : made.lines) options.log_info(line);
      const auto tokenizer = data::BpeTokenizer::load(config.model.hf_assets_path);
      const data::TokenFile tokens(with_conversation_data(config, made.folder).training.dataset_path);
      options.log_info(config.dpo.preferences.empty() ? sample_conversation(tokens, tokenizer, log::has_colors())
                                                      : sample_preference(tokens, tokenizer, log::has_colors()));
    }
    return made.folder.string();
  });
  on_every_rank(world, [&] {
    std::error_code error;
    if (std::filesystem::exists(folder, error)) return;
    throw DataError(
        fmt::format("rank 0 made the token files of {} in {}, but this rank does not see that folder: "
                    "expected a [job] dump_folder that all ranks see",
                    config.dpo.preferences.empty() ? "[sft] conversations" : "[dpo] preferences", folder));
  });
  return with_conversation_data(config, folder);
}

}  // namespace phalanx::train
