# For the recipes on inference: a small model and its tokenizer, trained for some seconds on this project's documents.
# Sourced by a script that has set its options.
source recipes/arguments.bash
build=build/release
folder=outputs/$(basename "$0" .sh)

read_options() {  # <known options> <arguments>: sets them and phalanx
  read_arguments "$@"
  phalanx=$build/bin/phalanx
  has_program "$phalanx"
}

# As a Hugging Face directory in $folder/run/hf.
make_small_model() {
  rm -rf "$folder"
  mkdir -p "$folder"
  "$phalanx" tokenize docs --vocab-size 512 --tokenizer "$folder/tokenizer.json" --output "$folder/train"
  "$phalanx" train recipes/pretrain.toml --job.dump_folder "$folder/run" --model.hf_assets_path "$folder" \
    --training.dataset_path "$folder/train.bin" --training.steps 30 --checkpoint.last_save_in_hf
}
