# For the recipes on inference: a small model and its tokenizer, trained for some seconds on this project's documents.
# Sourced by a script that has set its options.
# shellcheck source=scripts/options.bash
source scripts/options.bash
build=build/release
folder=outputs/$(basename "$0" .sh)

read_options() {  # <known options> -- <arguments>: sets them and phalanx
  take_only_options "$@"
  phalanx=$build/bin/phalanx
  require_program "$phalanx" --build
}

# As a Hugging Face directory in $folder/run/hf; what the programs say is in $folder/log.
make_small_model() {
  rm -rf "$folder"
  mkdir -p "$folder"
  quietly "$folder/log" "$phalanx" tokenize docs --vocab-size 512 --tokenizer "$folder/tokenizer.json" \
    --output "$folder/train"
  quietly "$folder/log" "$phalanx" train recipes/pretrain.toml --job.dump_folder "$folder/run" \
    --model.hf_assets_path "$folder" --training.dataset_path "$folder/train.bin" --training.steps 30 \
    --checkpoint.last_save_in_hf
}
