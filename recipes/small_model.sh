# For the recipes on inference: a small model and its tokenizer, trained for some seconds on this project's documents.
# Sourced; sets build, folder, ranks and phalanx.

read_arguments() {
  build=build/release
  folder=outputs/$(basename "$0" .sh)
  while [[ $# -gt 0 ]]; do
    case $1 in
      --build) build=$2; shift 2 ;;
      --folder) folder=$2; shift 2 ;;
      --ranks) ranks=$2; shift 2 ;;
      -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 0 ;;
      *) echo "$0: '$1' is not known: expected --build, --folder or --ranks" >&2; exit 2 ;;
    esac
  done
  phalanx=$build/bin/phalanx
  [[ -x $phalanx ]] || { echo "$0: no program '$phalanx'; build it, or give --build" >&2; exit 2; }
}

# As a Hugging Face directory in $folder/run/hf.
make_small_model() {
  rm -rf "$folder"
  mkdir -p "$folder"
  "$phalanx" tokenize docs --vocab-size 512 --tokenizer "$folder/tokenizer.json" --output "$folder/train"
  "$phalanx" train recipes/pretrain.toml --job.dump_folder "$folder/run" --model.hf_assets_path "$folder" \
    --training.dataset_path "$folder/train.bin" --training.steps 30 --checkpoint.last_save_in_hf
}
