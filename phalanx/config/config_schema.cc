#include "phalanx/config/config_schema.h"

#include <cmath>

#include "phalanx/models/config/llama_config.h"
#include "phalanx/models/config/model_family.h"

namespace phalanx::config {
namespace {

using C = TrainConfig;
using L = models::LoraOptions;

template <auto Section, auto Member>
Slot at(TrainConfig& config) {
  return &(config.*Section.*Member);
}

constexpr double kAny = std::numeric_limits<double>::infinity();
constexpr double kLargestCount = std::numeric_limits<std::int32_t>::max();

/// Counts are stored and multiplied as smaller integers in places. No larger count makes sense, except for the seed.
std::vector<Key> with_bounded_counts(std::vector<Key> keys) {
  TrainConfig config;
  for (Key& key : keys) {
    const bool is_integer = std::holds_alternative<std::int64_t*>(key.slot(config));
    if (is_integer && std::isinf(key.most) && key.name != "seed") key.most = kLargestCount;
  }
  return keys;
}

std::vector<std::string_view> family_choices() {
  std::vector<std::string_view> names;
  for (const auto family : models::all_families()) names.emplace_back(models::family_name(family));
  return names;
}

std::vector<std::string_view> flavor_choices() {
  static const std::vector<std::string> flavors = models::all_flavor_names();
  std::vector<std::string_view> names(flavors.begin(), flavors.end());
  names.push_back(kFlavorOfDirectory);
  return names;
}

}  // namespace

const std::vector<Key>& known_keys() {
  static const std::vector<Key> keys = {
      {"job", "dump_folder", at<&C::job, &C::Job::dump_folder>,
       "Folder of everything the run writes: checkpoints, metrics.jsonl, TensorBoard files, report.html."},
      {"job", "description", at<&C::job, &C::Job::description>, "Title of the run in its report."},

      {"model", "name", at<&C::model, &C::Model::name>,
       "Model family, as Hugging Face's model_type. With flavor hf, that of config.json.", -kAny, kAny,
       family_choices()},
      {"model", "flavor", at<&C::model, &C::Model::flavor>,
       "Named size of the family, or hf: that of config.json in hf_assets_path. The explicit keys below change single "
       "numbers of it.",
       -kAny, kAny, flavor_choices()},
      {"model", "hf_assets_path", at<&C::model, &C::Model::hf_assets_path>,
       "Folder with tokenizer.json, for the sample at the end of the run; a whole model as Hugging Face keeps it, for "
       "flavor hf and checkpoint.initial_load_in_hf."},
      {"model", "dim", at<&C::model, &C::Model::dim>, "Width of the hidden states.", 1, kAny, {}, kFromFlavor},
      {"model", "n_layers", at<&C::model, &C::Model::n_layers>, "Number of blocks.", 1, kAny, {}, kFromFlavor},
      {"model", "n_heads", at<&C::model, &C::Model::n_heads>, "Query heads; divides dim.", 1, kAny, {}, kFromFlavor},
      {"model",
       "n_kv_heads",
       at<&C::model, &C::Model::n_kv_heads>,
       "Key and value heads; divides n_heads.",
       1,
       kAny,
       {},
       kFromFlavor},
      {"model",
       "ffn_hidden",
       at<&C::model, &C::Model::ffn_hidden>,
       "Width inside the feed-forward layers.",
       1,
       kAny,
       {},
       kFromFlavor},
      {"model", "vocab_size", at<&C::model, &C::Model::vocab_size>, "Number of token ids.", 1, kAny, {}, kFromFlavor},
      {"model",
       "rope_theta",
       at<&C::model, &C::Model::rope_theta>,
       "Base of the rotary embedding's wavelengths.",
       1,
       kAny,
       {},
       kFromFlavor},
      {"model",
       "norm_eps",
       at<&C::model, &C::Model::norm_eps>,
       "Added to the mean square in RMSNorm.",
       1e-30,
       1,
       {},
       kFromFlavor},
      {"model",
       "tie_embeddings",
       at<&C::model, &C::Model::tie_embeddings>,
       "Use the embedding's weight for the output layer too.",
       -kAny,
       kAny,
       {},
       kFromFlavor},
      {"model", "converters", at<&C::model, &C::Model::converters>,
       "What is changed in the model before it is trained: `[\"quantize.linear.float8\"]` multiplies in float8, as "
       "that "
       "section says; or nothing."},

      {"optimizer",
       "name",
       at<&C::optimizer, &C::Optimizer::name>,
       "Optimizer. Muon: of matrices inside of blocks, as [muon] says; AdamW of all others.",
       -kAny,
       kAny,
       {"AdamW", "Lion", "SGD", "Muon"}},
      {"optimizer", "lr", at<&C::optimizer, &C::Optimizer::lr>, "Peak learning rate.", 0, kAny},
      {"optimizer", "beta1", at<&C::optimizer, &C::Optimizer::beta1>,
       "AdamW and Lion: decay of the mean of gradients; Lion's, where it takes its sign.", 0, 1},
      {"optimizer", "beta2", at<&C::optimizer, &C::Optimizer::beta2>,
       "AdamW: decay of the mean of squares. Lion: of the mean of gradients that it keeps; the paper has 0.98 or 0.99.",
       0, 1},
      {"optimizer", "eps", at<&C::optimizer, &C::Optimizer::eps>, "AdamW: added to the denominator.", 0, 1},
      {"optimizer", "weight_decay", at<&C::optimizer, &C::Optimizer::weight_decay>,
       "Weight decay, on every parameter that no_decay does not name; AdamW's and Lion's are decoupled.", 0, kAny},
      {"optimizer", "no_decay", at<&C::optimizer, &C::Optimizer::no_decay>,
       "Patterns of the names of parameters without weight decay, as a shell's over files: `[\"*norm*\", "
       "\"*.bias\"]`; on the command line separated by commas."},
      {"optimizer", "groups", at<&C::optimizer, &C::Optimizer::groups>,
       "Parameters with a rate or a weight decay of their own, one `[[optimizer.groups]]` table each: `params`, "
       "patterns "
       "as those of no_decay; `lr_factor` (1), which multiplies the learning rate; `weight_decay`. A parameter belongs "
       "to one group at most."},
      {"optimizer", "momentum", at<&C::optimizer, &C::Optimizer::momentum>, "SGD: momentum.", 0, 1},
      {"optimizer",
       "state_dtype",
       at<&C::optimizer, &C::Optimizer::state_dtype>,
       "AdamW: type in which both means are kept. The step is computed in float32. There are no moments of 8 bits.",
       -kAny,
       kAny,
       {"float32", "bfloat16"}},
      {"optimizer", "master_weights", at<&C::optimizer, &C::Optimizer::master_weights>,
       "Of bfloat16 weights (training.dtype): the optimizer keeps a float32 copy and steps that. false: the weights "
       "are widened for the step and rounded after it."},
      {"optimizer", "stochastic_rounding", at<&C::optimizer, &C::Optimizer::stochastic_rounding>,
       "How bfloat16 moments, and bfloat16 weights without master_weights, are rounded after a step: up or down at "
       "random, by debug.seed, the number of the step, the name and the index, so that the mean is exact. false: to "
       "the nearest number, which loses small changes."},

      {"muon",
       "lr",
       at<&C::muon, &C::Muon::lr>,
       "Peak learning rate of the matrices; the schedule is that of all.",
       0,
       kAny,
       {},
       "optimizer.lr"},
      {"muon",
       "weight_decay",
       at<&C::muon, &C::Muon::weight_decay>,
       "Of the matrices, where neither no_decay nor a group says another.",
       0,
       kAny,
       {},
       "optimizer.weight_decay"},
      {"muon", "momentum", at<&C::muon, &C::Muon::momentum>, "Momentum.", 0, 1},
      {"muon", "nesterov", at<&C::muon, &C::Muon::nesterov>, "Nesterov's form of it."},
      {"muon", "ns_steps", at<&C::muon, &C::Muon::ns_steps>, "Newton-Schulz iterations.", 1, 99},
      {"muon", "ns_coefficients", at<&C::muon, &C::Muon::ns_coefficients>,
       "Coefficients a, b, c of an iteration: a x + (b x x^T + c (x x^T)^2) x."},
      {"muon", "eps", at<&C::muon, &C::Muon::eps>, "The least norm by which a matrix is divided.", 1e-30, kAny},
      {"muon",
       "adjust_lr_fn",
       at<&C::muon, &C::Muon::adjust_lr_fn>,
       "How the shape of a matrix adjusts its rate: original multiplies it by sqrt(max(1, rows / columns)), "
       "match_rms_adamw by 0.2 sqrt(max(rows, columns)), so that rates and weight decays tuned for AdamW hold.",
       -kAny,
       kAny,
       {"original", "match_rms_adamw"}},
      {"muon", "adamw_params", at<&C::muon, &C::Muon::adamw_params>,
       "Patterns of the names of matrices that AdamW steps, beside embeddings, output and routers."},

      {"ema", "decay", at<&C::ema, &C::Ema::decay>,
       "Exponential moving average of the weights: after a step it is decay times itself plus 1 - decay times the "
       "weights. 0: none is kept.",
       0, 1},
      {"ema", "start_step", at<&C::ema, &C::Ema::start_step>, "Up to this step the average is the weights themselves.",
       0, kAny},
      {"ema", "update_every", at<&C::ema, &C::Ema::update_every>, "Steps from one update to the next.", 1, kAny},
      {"ema", "use_in_validation", at<&C::ema, &C::Ema::use_in_validation>, "Validate the average, not the weights."},
      {"ema", "use_in_export", at<&C::ema, &C::Ema::use_in_export>,
       "Write the average, not the weights, to hf/ and adapter/ at the end."},

      {"lr_scheduler", "warmup_steps", at<&C::lr_scheduler, &C::LrScheduler::warmup_steps>,
       "Steps of linear warm-up from 0.", 0, kAny},
      {"lr_scheduler",
       "decay_ratio",
       at<&C::lr_scheduler, &C::LrScheduler::decay_ratio>,
       "Share of all steps, at the end, over which the rate decays; constant before (warm-up, stable, decay). 0: "
       "never. "
       "Not set: the decay begins right after warm-up.",
       0,
       1,
       {},
       "not set"},
      {"lr_scheduler",
       "decay_type",
       at<&C::lr_scheduler, &C::LrScheduler::decay_type>,
       "Shape of the decay.",
       -kAny,
       kAny,
       {"linear", "sqrt", "cosine"}},
      {"lr_scheduler", "min_lr_factor", at<&C::lr_scheduler, &C::LrScheduler::min_lr_factor>,
       "The last rate as a share of the peak.", 0, 1},

      {"training", "dataset_path", at<&C::training, &C::Training::dataset_path>,
       "Token file: made by `phalanx tokenize` (Megatron .bin with .idx), nanoGPT or llm.c .bin."},
      {"training", "datasets", at<&C::training, &C::Training::datasets>,
       "Token files that are blended, one `[[training.datasets]]` table each, in place of dataset_path: `path`; "
       "`weight` "
       "(1), its share of the sequences; `name`; `range` of tokens, `[begin, end]`."},
      {"training",
       "dataset_dtype",
       at<&C::training, &C::Training::dataset_dtype>,
       "How a file of raw ids (nanoGPT's) stores an id, of all data sets. auto: as the "
       "file's "
       ".json says, else uint16, or uint32 for a vocabulary above 65536. Files with an index or a header must say the "
       "same.",
       -kAny,
       kAny,
       {"auto", "uint8", "int8", "uint16", "int16", "uint32", "int32", "int64"}},
      {"training", "allow_tokenizer_mismatch", at<&C::training, &C::Training::allow_tokenizer_mismatch>,
       "Train although the token files were made with another tokenizer than the one in model.hf_assets_path, or the "
       "checkpoint's run had another. It is said."},
      {"training", "local_batch_size", at<&C::training, &C::Training::local_batch_size>,
       "Sequences in one forward pass of one rank.", 1, kAny},
      {"training", "global_batch_size", at<&C::training, &C::Training::global_batch_size>,
       "Sequences in one optimizer step over all ranks; gradients are accumulated as needed. -1: local_batch_size x "
       "ranks.",
       -1, kAny},
      {"training", "num_tokens_per_microbatch_per_dp_rank",
       at<&C::training, &C::Training::num_tokens_per_microbatch_per_dp_rank>,
       "Another way to give local_batch_size: tokens, a multiple of seq_len. -1: not used.", -1, kAny},
      {"training", "num_tokens_per_train_step", at<&C::training, &C::Training::num_tokens_per_train_step>,
       "Another way to give global_batch_size: tokens, a multiple of seq_len. -1: not used.", -1, kAny},
      {"training", "seq_len", at<&C::training, &C::Training::seq_len>, "Tokens of a sequence.", 1, kAny},
      {"training", "frozen", at<&C::training, &C::Training::frozen>,
       "Patterns of the names of parameters that keep their values, as a shell's over files: `[\"tok_embeddings*\", "
       "\"layers.[0-3].*\"]`; on the command line separated by commas. They have no gradient and no optimizer state; "
       "checkpoints hold them."},
      {"training", "moe_aux_loss_coeff", at<&C::training, &C::Training::moe_aux_loss_coeff>,
       "Weight of a loss that evens out the load of experts, as the mean over the sequences of a step. The printed "
       "loss "
       "is without it. 0: none.",
       0, kAny},
      {"training",
       "moe_aux_loss_unit",
       at<&C::training, &C::Training::moe_aux_loss_unit>,
       "Whose tokens that loss counts together. sequence: those of a sequence, the same in every layout. micro_batch: "
       "those of a micro-batch of a data rank. global_batch: those of all data ranks in one forward pass; under "
       "accumulation and in a pipeline that is one micro-batch of each.",
       -kAny,
       kAny,
       {"sequence", "micro_batch", "global_batch"}},
      {"training", "moe_z_loss_coeff", at<&C::training, &C::Training::moe_z_loss_coeff>,
       "Weight of a loss that keeps the routers' logits small: for every layer the mean of log(sum(exp(logits)))^2 "
       "over "
       "the tokens of a step. The printed loss is without it. 0: none; 1e-3 is usual.",
       0, kAny},
      {"training", "moe_router_enable_expert_bias", at<&C::training, &C::Training::moe_router_enable_expert_bias>,
       "Gives each expert a bias that counts where the experts of a token are chosen, and nowhere else. After each "
       "step "
       "it falls where an expert had more tokens than the mean, and rises where it had fewer. Checkpoints hold it."},
      {"training", "moe_router_bias_update_rate", at<&C::training, &C::Training::moe_router_bias_update_rate>,
       "By how much that bias moves in a step (torchtitan: load_balance_coeff). 0: it stays as it is.", 0, kAny},
      {"training", "moe_input_jitter_eps", at<&C::training, &C::Training::moe_input_jitter_eps>,
       "In training each number that a router sees is multiplied by one between 1 - eps and 1 + eps, drawn from "
       "debug.seed; the same in every layout. Experts see it as it is. 0: none; 1e-2 is usual.",
       0, 1},
      {"training", "moe_expert_capacity_factor", at<&C::training, &C::Training::moe_expert_capacity_factor>,
       "In training an expert takes the first tokens of a sequence that choose it, this times the number of an even "
       "load, rounded up; of the others its result is zero. 0: it takes all of them.",
       0, kAny},
      {"training", "max_norm", at<&C::training, &C::Training::max_norm>,
       "Gradients are scaled down to this global norm. 0: never.", 0, kAny},
      {"training", "z_loss_weight", at<&C::training, &C::Training::z_loss_weight>,
       "Weight of the z-loss: this times the mean of log(sum(exp(logits)))^2, over the tokens with a label, is added "
       "to the loss that is trained (not to that of validation). It keeps logits from drifting; 1e-4 is usual.",
       0, kAny},
      {"training", "steps", at<&C::training, &C::Training::steps>, "Optimizer steps of the whole run.", 1, kAny},
      {"training", "shuffle", at<&C::training, &C::Training::shuffle>,
       "Take the sequences in an order drawn from debug.seed; off: in the file's order."},
      {"training",
       "attn_mask_type",
       at<&C::training, &C::Training::attn_mask_type>,
       "What a token attends to. causal: all tokens before it in its sequence. block_causal: those of its own "
       "document; "
       "positions count from its start, and its first token is no label. Needs token files that list their documents "
       "(`phalanx tokenize`).",
       -kAny,
       kAny,
       {"causal", "block_causal"}},
      {"training",
       "packing",
       at<&C::training, &C::Training::packing>,
       "How sequences are filled. none: consecutive tokens, cut every seq_len. best_fit: whole documents, as many as "
       "fit, and padding without a loss; only a document longer than seq_len is cut. Needs block_causal.",
       -kAny,
       kAny,
       {"none", "best_fit"}},
      {"training",
       "dtype",
       at<&C::training, &C::Training::dtype>,
       "Type in which weights are kept. bfloat16: gradients of a pass, too; for AdamW, with mixed_precision_param = "
       "bfloat16. optimizer.master_weights, state_dtype and stochastic_rounding say what the optimizer keeps.",
       -kAny,
       kAny,
       {"float32", "bfloat16"}},
      {"training",
       "mixed_precision_param",
       at<&C::training, &C::Training::mixed_precision_param>,
       "Type of the matrix products. Without sharding by autocast; under sharding units are gathered in it. Weights "
       "are kept in training.dtype. float16: with loss scaling.",
       -kAny,
       kAny,
       {"float32", "bfloat16", "float16"}},
      {"training",
       "mixed_precision_reduce",
       at<&C::training, &C::Training::mixed_precision_reduce>,
       "Type in which sharded gradients are kept and summed.",
       -kAny,
       kAny,
       {"float32", "bfloat16", "float16"}},
      {"training",
       "float32_matmul_precision",
       at<&C::training, &C::Training::float32_matmul_precision>,
       "Products of float32 matrices on a GPU, as torch.set_float32_matmul_precision(). highest: in float32. high: in "
       "TF32, with 10 bits of mantissa. On the CPU, and in `phalanx verify`, they are in float32.",
       -kAny,
       kAny,
       {"highest", "high"}},
      {"training", "initial_loss_scale", at<&C::training, &C::Training::initial_loss_scale>,
       "float16: what the loss is multiplied by at first; halved after a step whose gradients are not finite, which is "
       "skipped on all ranks.",
       1, 1e30},
      {"training", "loss_scale_window", at<&C::training, &C::Training::loss_scale_window>,
       "float16: steps in a row with finite gradients after which the scale is doubled.", 1, kAny},
      {"training", "enable_cpu_offload", at<&C::training, &C::Training::enable_cpu_offload>,
       "Under sharding: weights, gradients and optimizer state lie in the host's memory, where the step is done too."},

      {"stream", "paths", at<&C::stream, &C::Stream::paths>,
       "Texts to train on without a token file, in place of training.dataset_path: files, folders or patterns of JSON "
       "lines, Parquet or text, as of `phalanx tokenize`. Tokenised by model.hf_assets_path; on the command line "
       "separated by commas."},
      {"stream", "field", at<&C::stream, &C::Stream::field>, "Field of a record that holds its text."},
      {"stream", "window", at<&C::stream, &C::Stream::window>,
       "Documents that are shuffled and put into sequences together; they are held in memory.", 1, 1 << 24},
      {"stream", "workers", at<&C::stream, &C::Stream::workers>,
       "Threads of each rank that read and tokenise ahead of the step; the data are the same for every number.", 1,
       1024},
      {"stream", "special_tokens", at<&C::stream, &C::Stream::special_tokens>,
       "Puts the tokens around each text that the tokenizer's template puts there, such as <s>."},

      {"lora", "rank", at<&C::lora, &L::rank>,
       "Train low-rank adapters of this rank (LoRA) on the layers of target_modules, and nothing else. 0: train the "
       "model itself (docs/lora.md).",
       0, kAny},
      {"lora", "alpha", at<&C::lora, &L::alpha>, "What an adapter adds is scaled by alpha / rank.", 1e-6, 1e6},
      {"lora", "use_rslora", at<&C::lora, &L::use_rslora>,
       "Scales what an adapter adds by alpha / sqrt(rank) instead (rank-stabilised LoRA)."},
      {"lora", "dropout", at<&C::lora, &L::dropout>,
       "Probability that an element of an adapter's input is set to 0 in training; the rest are scaled by 1 / (1 - p).",
       0, 0.99},
      {"lora", "target_modules", at<&C::lora, &L::target_modules>,
       "Layers with adapters: all-linear (every matrix of the blocks but routers and experts), names as in PEFT "
       "(`[\"q_proj\", \"v_proj\"]`; lm_head is the output layer) or here (wq), or a shell's patterns over "
       "whole names; on the command line separated by commas."},
      {"lora", "base_dtype", at<&C::lora, &L::base_dtype>,
       "Type in which the frozen weights under adapters are stored, once; they are rounded to it when they are read. "
       "bfloat16: half the memory. nf4: the matrices of the blocks in 4 bits (QLoRA), all else in bfloat16. Adapters "
       "stay "
       "float32.",
       -kAny, kAny, std::vector<std::string_view>(models::kBaseDtypes.begin(), models::kBaseDtypes.end())},
      {"lora", "zero_b", at<&C::lora, &L::zero_b>,
       "A new adapter's B starts as zeros, so that the model starts as the base. Off: at random, for tests."},
      {"lora", "initial_adapter", at<&C::lora, &C::Lora::initial_adapter>,
       "Folder of an adapter, as PEFT saves it, whose values a new run begins with. Its rank, alpha and layers must be "
       "those of this section."},

      {"parallelism", "data_parallel_replicate_degree",
       at<&C::parallelism, &C::Parallelism::data_parallel_replicate_degree>,
       "Copies of the model, or of its shards, whose gradients are summed (DDP, HSDP). -1: as many as "
       "data_parallel_shard_degree leaves.",
       -1, kAny},
      {"parallelism", "data_parallel_shard_degree", at<&C::parallelism, &C::Parallelism::data_parallel_shard_degree>,
       "Ranks among which a copy of the model is sharded (FSDP, ZeRO). -1: as many as data_parallel_replicate_degree "
       "leaves; with both at -1, all.",
       -1, kAny},
      {"parallelism", "zero_stage", at<&C::parallelism, &C::Parallelism::zero_stage>,
       "What is sharded: 1 the optimizer's state, 2 gradients too, 3 parameters too.", 1, 3},
      {"parallelism",
       "fsdp_reshard_after_forward",
       at<&C::parallelism, &C::Parallelism::fsdp_reshard_after_forward>,
       "Stage 3: whether a block's parameters are let go after the forward pass and gathered again for the backward "
       "pass (less memory), kept, or kept by every so many neighbouring ranks together, which divides the shard "
       "degree. default: always; in a pipeline never: units are gathered once a step.",
       -kAny,
       kAny,
       {"default", "always", "never"},
       {},
       "a number of ranks"},
      {"parallelism",
       "fsdp_reduce_each_microbatch",
       at<&C::parallelism, &C::Parallelism::fsdp_reduce_each_microbatch>,
       "Stages 2 and 3 with accumulation: whether every micro-batch sums its gradients among the ranks that share "
       "a copy, each of which adds up its rows alone; or the last one does, and whole gradients are kept until then "
       "(more memory, less communication, the bits of data parallelism). default: always; in a pipeline once a step, "
       "for "
       "which a rank keeps gradients of all parameters of its stages: 4 bytes each, or those of "
       "mixed_precision_reduce.",
       -kAny,
       kAny,
       {"default", "always", "never"}},
      {"parallelism", "context_parallel_degree", at<&C::parallelism, &C::Parallelism::context_parallel_degree>,
       "Ranks that have the same sequences, each with some of their positions: for sequences whose activations do not "
       "fit "
       "one rank. They hold the same weights, or shards of them if data_parallel_shard_degree is not 1.",
       1, kAny},
      {"parallelism",
       "context_parallel_exchange",
       at<&C::parallelism, &C::Parallelism::context_parallel_exchange>,
       "What attention exchanges between these ranks. keys: each rank gathers all keys and values, and attends from "
       "its own positions with all heads. ring: keys and values go from rank to rank while attention is computed, and "
       "none is kept. heads (Ulysses): each rank attends from all positions with some heads, which the degree then "
       "divides. auto: by a cost model, which says why in the log.",
       -kAny,
       kAny,
       {"keys", "heads", "ring", "auto"}},
      {"parallelism", "context_parallel_rotate_method",
       at<&C::parallelism, &C::Parallelism::context_parallel_rotate_method>,
       "torchtitan's key. allgather: what context_parallel_exchange says. alltoall, torchtitan's ring: as "
       "context_parallel_exchange = \"ring\". Not with heads and auto."},
      {"parallelism",
       "context_parallel_load_balancer",
       at<&C::parallelism, &C::Parallelism::context_parallel_load_balancer>,
       "Which positions a rank has. headtail: a piece from the head of the sequence and one from its tail. ptrr "
       "(torchtitan's name): blocks of each packed sequence, dealt out by attention's work, for attn_mask_type = "
       "\"block_causal\" and an exchange of keys. auto: ptrr where it can be, headtail elsewhere. "
       "With moe_input_jitter_eps it cannot.",
       -kAny,
       kAny,
       {"auto", "headtail", "ptrr"}},
      {"parallelism", "tensor_parallel_degree", at<&C::parallelism, &C::Parallelism::tensor_parallel_degree>,
       "Neighbouring ranks over which every large matrix is cut. Divides heads, ffn_hidden, vocabulary and ranks.", 1,
       kAny},
      {"parallelism", "enable_sequence_parallel", at<&C::parallelism, &C::Parallelism::enable_sequence_parallel>,
       "Under tensor parallelism each rank has some of the tokens between the matrices (norms, residuals), which takes "
       "less memory at the same communication. The degree divides seq_len then."},
      {"parallelism", "enable_async_tensor_parallel",
       at<&C::parallelism, &C::Parallelism::enable_async_tensor_parallel>,
       "With enable_sequence_parallel: attention and feed-forward multiply piece by piece while tokens are on their "
       "way "
       "between the ranks. Otherwise before and after; the sums over the ranks are the same."},
      {"parallelism", "expert_parallel_degree", at<&C::parallelism, &C::Parallelism::expert_parallel_degree>,
       "Neighbouring ranks along data_parallel_shard_degree that divide the experts of each layer among themselves. "
       "Divides that degree and the number of experts.",
       1, kAny},
      {"parallelism", "pipeline_parallel_degree", at<&C::parallelism, &C::Parallelism::pipeline_parallel_degree>,
       "Ranks over which the layers are cut into stages.", 1, kAny},
      {"parallelism", "pipeline_parallel_schedule", at<&C::parallelism, &C::Parallelism::pipeline_parallel_schedule>,
       "In what order stages work: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble or "
       "DualPipeV (docs/pipeline_schedules.md)."},
      {"parallelism", "pipeline_parallel_microbatch_size",
       at<&C::parallelism, &C::Parallelism::pipeline_parallel_microbatch_size>,
       "Sequences that go through a pipeline together. Divides a data rank's share of the global batch.", 1, kAny},
      {"parallelism", "pipeline_parallel_stages_per_rank",
       at<&C::parallelism, &C::Parallelism::pipeline_parallel_stages_per_rank>,
       "0: as many as is usual for the schedule, 1 or 2.", 0, kAny},
      {"parallelism",
       "pipeline_parallel_balance",
       at<&C::parallelism, &C::Parallelism::pipeline_parallel_balance>,
       "What makes the stages equal: the multiplications of their half-layers (counted), or the time that each kind of "
       "half-layer and the output take, which rank 0 measures at the start (measured).",
       -kAny,
       kAny,
       {"counted", "measured"}},

      {"activation_checkpoint",
       "mode",
       at<&C::activation_checkpoint, &C::ActivationCheckpoint::mode>,
       "Blocks that keep their input alone and compute their activations again in the backward pass: none of them, all "
       "(full), or those that selective_ac_option says (selective).",
       -kAny,
       kAny,
       {"none", "full", "selective"}},
      {"activation_checkpoint",
       "selective_ac_option",
       at<&C::activation_checkpoint, &C::ActivationCheckpoint::selective_ac_option>,
       "Under mode = \"selective\": of how many blocks one is computed again, or op: all are, but keep the outputs of "
       "attention and of every second linear layer as well.",
       -kAny,
       kAny,
       {"op"},
       {},
       "a number of blocks"},

      {kFloat8Section,
       "recipe_name",
       at<&C::float8, &C::Float8::recipe_name>,
       "How numbers are scaled before they are cast to float8. tensorwise: one scale a matrix; inputs and weights in "
       "e4m3, gradients in e5m2. rowwise: one scale a row of each factor, a power of two; e4m3 throughout "
       "(docs/float8.md).",
       -kAny,
       kAny,
       {"tensorwise", "rowwise"}},
      {kFloat8Section, "filter_fqns", at<&C::float8, &C::Float8::filter_fqns>,
       "Linear layers whose name contains one of these stay in mixed_precision_param. The output, routers, experts and "
       "layers with a size that is no multiple of 16 always do."},
      {kFloat8Section, "emulate", at<&C::float8, &C::Float8::emulate>,
       "Cast to float8, but multiply in float32, as the CPU always does: slow, to see what float8 does to the losses "
       "on "
       "a device without such products."},

      {"checkpoint", "enable", at<&C::checkpoint, &C::Checkpoint::enable>,
       "Save checkpoints and continue from the newest complete one."},
      {"checkpoint", "folder", at<&C::checkpoint, &C::Checkpoint::folder>,
       "Folder of the checkpoints, in job.dump_folder unless absolute."},
      {"checkpoint", "interval", at<&C::checkpoint, &C::Checkpoint::interval>,
       "Steps between checkpoints. One is also saved at the end and after the step in which one of stop_signals comes.",
       1, kAny},
      {"checkpoint", "keep_latest_k", at<&C::checkpoint, &C::Checkpoint::keep_latest_k>,
       "Older checkpoints than the latest k are removed. 0: keep all.", 0, kAny},
      {"checkpoint",
       "async_mode",
       at<&C::checkpoint, &C::Checkpoint::async_mode>,
       "async: training goes on while a copy of the state is written; a failure ends the run in the step in "
       "which it is known. disabled: steps wait until it is on the disk.",
       -kAny,
       kAny,
       {"disabled", "async"}},
      {"checkpoint", "load_step", at<&C::checkpoint, &C::Checkpoint::load_step>,
       "Roll back: begin a branch from this step's checkpoint; newer ones are set aside in abandoned-N. The same "
       "command "
       "again goes on with its branch (docs/checkpoints.md). -1: continue from the newest complete one.",
       -1, kAny},
      {"checkpoint", "convert_dtype", at<&C::checkpoint, &C::Checkpoint::convert_dtype>,
       "Convert floating-point tensors that were saved in another type while they are loaded; else they are an error, "
       "as a run that goes on is to have the same numbers."},
      {"checkpoint", "initial_load_path", at<&C::checkpoint, &C::Checkpoint::initial_load_path>,
       "Weights of a new run: a checkpoint's folder, or with initial_load_in_hf a safetensors file or a folder of "
       "them (unset: model.hf_assets_path). "
       "Ignored when the run continues from a checkpoint of its own."},
      {"checkpoint", "initial_load_in_hf", at<&C::checkpoint, &C::Checkpoint::initial_load_in_hf>,
       "A new run starts from safetensors with Hugging Face's names, in fp32, fp16 or bf16."},
      {"checkpoint", "allow_data_mismatch", at<&C::checkpoint, &C::Checkpoint::allow_data_mismatch>,
       "Go on from a checkpoint although its run read another token file, in another order, with another seed, in "
       "another range or with another sequence length inside a shuffled epoch. The data then begin at their beginning. "
       "It is said."},
      {"checkpoint", "initial_random_weights", at<&C::checkpoint, &C::Checkpoint::initial_random_weights>,
       "With model.flavor hf: a new run starts from random weights, of the shape of config.json alone. Without this "
       "and "
       "without initial weights it is refused."},
      {"checkpoint", "allow_model_mismatch", at<&C::checkpoint, &C::Checkpoint::allow_model_mismatch>,
       "Load weights although the description of the model that comes with them (a checkpoint's metadata, config.json) "
       "is not that of [model]: heads, rotary settings, norm_eps, ... Each difference is said."},
      {"checkpoint", "last_save_in_hf", at<&C::checkpoint, &C::Checkpoint::last_save_in_hf>,
       "At the end also write the model to hf/ in job.dump_folder as transformers reads it: model.safetensors, "
       "config.json, generation_config.json and, from model.hf_assets_path, the tokenizer's files."},
      {"checkpoint",
       "export_dtype",
       at<&C::checkpoint, &C::Checkpoint::export_dtype>,
       "Type of the weights in hf/. Checkpoints keep them in training.dtype whatever it is.",
       -kAny,
       kAny,
       {"float32", "bfloat16", "float16"}},
      {"checkpoint", "export_file_gb", at<&C::checkpoint, &C::Checkpoint::export_file_gb>,
       "Most gigabytes of one file of weights in hf/: more are several files and model.safetensors.index.json. 0: one "
       "file of any size.",
       0, 1e6},

      {"checkpoint", "stop_signals", at<&C::checkpoint, &C::Checkpoint::stop_signals>,
       "Signals at which all ranks finish the step, save a checkpoint and end with status 0; outside of the steps, or "
       "at "
       "the second one, the process ends at once. On the command line separated by commas."},

      {"metrics", "log_freq", at<&C::metrics, &C::Metrics::log_freq>,
       "Steps between log lines; the first step is always logged. metrics.jsonl has every step.", 1, kAny},
      {"metrics", "enable_tensorboard", at<&C::metrics, &C::Metrics::enable_tensorboard>, "Write TensorBoard files."},
      {"metrics", "save_tb_folder", at<&C::metrics, &C::Metrics::save_tb_folder>,
       "Folder of the TensorBoard files, in job.dump_folder."},
      {"metrics", "enable_report", at<&C::metrics, &C::Metrics::enable_report>,
       "Write report.html at the end of the run (`phalanx report` writes it at any time)."},
      {"metrics", "sample_prompt", at<&C::metrics, &C::Metrics::sample_prompt>,
       "Text that the trained model continues at the end of the run, shown in the report. Empty: no sample."},
      {"metrics", "sample_tokens", at<&C::metrics, &C::Metrics::sample_tokens>, "Length of that sample, in tokens.", 1,
       kAny},
      {"metrics", "disable_color_printing", at<&C::metrics, &C::Metrics::disable_color_printing>,
       "Log lines have no colours, on a terminal either; the variable NO_COLOR does the same."},

      {"profiling", "enable_profiling", at<&C::profiling, &C::Profiling::enable_profiling>,
       "Write traces of training steps, one file a rank, for ui.perfetto.dev or chrome://tracing."},
      {"profiling", "profile_freq", at<&C::profiling, &C::Profiling::profile_freq>,
       "Steps from one trace to the next: step profile_freq is the first.", 1, kAny},
      {"profiling", "profiler_active", at<&C::profiling, &C::Profiling::profiler_active>,
       "Steps in one trace; the last is the one that gives its folder the name.", 1, kAny},
      {"profiling", "save_traces_folder", at<&C::profiling, &C::Profiling::save_traces_folder>,
       "Folder of the traces, in job.dump_folder: iteration_N/rankR_trace.json."},
      {"profiling", "record_kernels", at<&C::profiling, &C::Profiling::record_kernels>,
       "Also write what ran in the traced steps, with a table of the times: on a GPU each kernel and copy, on a CPU "
       "each "
       "operator of libtorch (iteration_N/rankR_kernels.json and .txt). The first traced step then waits for the GPU."},

      {"comm", "init_timeout_seconds", at<&C::comm, &C::Comm::init_timeout_seconds>,
       "Longest wait for another rank until the first step is done.", 1, kAny},
      {"comm", "train_timeout_seconds", at<&C::comm, &C::Comm::train_timeout_seconds>,
       "Longest wait for another rank afterwards.", 1, kAny},
      {"comm", "heartbeat_seconds", at<&C::comm, &C::Comm::heartbeat_seconds>,
       "Longest wait for a rank whose process is stopped or gives no sign of life; 0: as long as for any.", 0, 86'400},
      {"comm",
       "backend",
       at<&C::comm, &C::Comm::backend>,
       "Transport between ranks. auto: shm where all ranks share memory, shm and gloo where some do, else gloo; nccl "
       "besides on GPUs. mpi: Open MPI, under mpirun or srun; shm+mpi: between nodes only. With shm, gloo or mpi, "
       "GPUs exchange data through host memory; with nccl+gloo or nccl+mpi only what goes from one node to another.",
       -kAny,
       kAny,
       {"auto", "shm", "gloo", "mpi", "shm+gloo", "shm+mpi", "nccl", "nccl+gloo", "nccl+mpi"}},
      {"comm", "shared_heap", at<&C::comm, &C::Comm::shared_heap>,
       "Large CPU tensors lie in memory that the ranks of one node read and write where it is: collectives of shm "
       "need fewer copies."},
      {"comm", "strict", at<&C::comm, &C::Comm::strict>,
       "On nccl the host waits in every operation until all ranks are known to call the same, and a mismatch is that "
       "operation's error, not a later one's."},
      {"comm", "trace_buf_size", at<&C::comm, &C::Comm::trace_buf_size>,
       "Operations of each group of ranks that the flight recorder keeps, to be written on an error, a time-out or "
       "SIGQUIT. 0: nothing is written.",
       0, 10'000'000},
      {"comm", "save_traces_folder", at<&C::comm, &C::Comm::save_traces_folder>,
       "Folder of the flight recorder's files, in job.dump_folder; see `phalanx trace analyze`. The variable "
       "PHALANX_COMM_TRACE_DIR overrules it."},
      {"comm", "save_traces_file_prefix", at<&C::comm, &C::Comm::save_traces_file_prefix>,
       "Beginning of the names of these files; the rank and .json follow."},

      {"validation", "enable", at<&C::validation, &C::Validation::enable>, "Measure the loss on held-out tokens."},
      {"validation", "dataset_path", at<&C::validation, &C::Validation::dataset_path>,
       "Token file to validate on. Empty: the last part of each training data set, which is then not trained on."},
      {"validation", "datasets", at<&C::validation, &C::Validation::datasets>,
       "Token files to validate on, one `[[validation.datasets]]` table each, in place of dataset_path: `path`, "
       "`name`, "
       "`range`. The log and the metrics have a loss for each."},
      {"validation", "fraction", at<&C::validation, &C::Validation::fraction>,
       "Share of each training data set that is held out when there is no validation data set.", 0, 0.9},
      {"validation", "local_batch_size", at<&C::validation, &C::Validation::local_batch_size>,
       "Sequences in one forward pass of one rank. -1: training.local_batch_size.", -1, kAny},
      {"validation", "freq", at<&C::validation, &C::Validation::freq>,
       "Steps between validations. One is also done after the last step.", 1, kAny},
      {"validation", "steps", at<&C::validation, &C::Validation::steps>,
       "Batches of one validation. -1: all held-out tokens.", -1, kAny},

      {"sft", "conversations", at<&C::sft, &C::Sft::conversations>,
       "Files of conversations (JSON lines) to train on, in place of training.dataset_path: what the assistant says in "
       "them (docs/sft.md). training.packing is best_fit and attn_mask_type block_causal then. On the command line "
       "separated by commas."},
      {"sft", "validation_conversations", at<&C::sft, &C::Sft::validation_conversations>,
       "With validation.enable: files of conversations to validate on. Empty: validation.fraction of "
       "sft.conversations, which is then not trained on."},
      {"sft", "chat_template", at<&C::sft, &C::Sft::chat_template>,
       "Which of the chat templates of model.hf_assets_path, where it has several by name. Empty: its default, and "
       "tool_use for conversations with tools."},
      {"sft",
       "too_long",
       at<&C::sft, &C::Sft::too_long>,
       "What becomes of a conversation of more than seq_len + 1 tokens: cut takes so many from its start, leave_out "
       "none. How many is said.",
       -kAny,
       kAny,
       {"cut", "leave_out"}},
      {"sft", "skip_malformed", at<&C::sft, &C::Sft::skip_malformed>,
       "Leave out records that are malformed or that the chat template refuses; how many is said, and the first. Off: "
       "they are an error, with file, line and reason."},

      {"dpo", "preferences", at<&C::dpo, &C::Dpo::preferences>,
       "Files of preferences (JSON lines of a prompt, a chosen and a rejected answer) to tune on, in place of "
       "training.dataset_path (docs/dpo.md). The loss is that of direct preference optimization. training.packing is "
       "best_fit and attn_mask_type block_causal then. On the command line separated by commas."},
      {"dpo", "validation_preferences", at<&C::dpo, &C::Dpo::validation_preferences>,
       "With validation.enable: files of preferences to validate on. Empty: validation.fraction of dpo.preferences, "
       "which "
       "is then not trained on."},
      {"dpo", "chat_template", at<&C::dpo, &C::Dpo::chat_template>,
       "Which of the chat templates of model.hf_assets_path, where it has several by name, as sft.chat_template."},
      {"dpo", "skip_malformed", at<&C::dpo, &C::Dpo::skip_malformed>,
       "Leave out records that are malformed or that the chat template refuses; how many is said, and the first. Off: "
       "they are an error, with file, line and reason."},
      {"dpo", "beta", at<&C::dpo, &C::Dpo::beta>,
       "How strongly the model is held to the reference: rewards are beta times the difference of log-likelihoods.", 0,
       kAny},
      {"dpo",
       "loss_type",
       at<&C::dpo, &C::Dpo::loss_type>,
       "The loss of a pair whose answers' rewards differ by m: sigmoid is -log(sigmoid(m)), hinge is max(0, 1 - m).",
       -kAny,
       kAny,
       {"sigmoid", "hinge"}},
      {"dpo", "label_smoothing", at<&C::dpo, &C::Dpo::label_smoothing>,
       "With the sigmoid loss: the probability that a pair's two answers are mixed up.", 0, 0.5},

      {"memory", "check", at<&C::memory, &C::Memory::check>,
       "Refuse a run whose predicted memory does not fit into what the limits of the process, its cgroup, the machine "
       "or the card leave, before anything is allocated."},

      {"debug", "seed", at<&C::debug, &C::Debug::seed>,
       "Seed of the initial weights and of the data order; independent of the number of ranks.", 0, kAny},
      {"debug", "deterministic", at<&C::debug, &C::Debug::deterministic>,
       "On CUDA: use only kernels that give the same bits on every run. On the CPU that is always so."},
      {"debug", "replica_check_freq", at<&C::debug, &C::Debug::replica_check_freq>,
       "Every so many steps ranks that should hold the same bits of weights and optimizer state compare hashes of them "
       "before the update; a difference ends the run and names tensor, ranks and step. 0: never.",
       0, kAny},
  };
  static const std::vector<Key> bounded = with_bounded_counts(keys);
  return bounded;
}

}  // namespace phalanx::config
