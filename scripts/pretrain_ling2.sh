#!/usr/bin/env bash
# Ling2 pre-training (hybrid MLA/lightning attention, MoE, MTP) on Megatron .bin/.idx data.
#
# Every setting below can be given as an environment variable; any argument of this script is
# passed on, last, as a key=value override:
#   STEPS=1000 DATASET_PATH=/data/corpus bash scripts/pretrain_ling2.sh loss.loss_groups=8
#   MODEL_NAME=ling2_tiny DATASET_TYPE=synthetic STEPS=2 bash scripts/pretrain_ling2.sh
set -euo pipefail

# ============================================================================
# 1. Tokenizer
# ============================================================================
MODEL_NAME=${MODEL_NAME:-ling2}
case $MODEL_NAME in
  ling2_tiny) # the built-in byte tokenizer: 256 bytes, then <|endoftext|>
    VOCAB_SIZE=${VOCAB_SIZE:-512}
    EOD_ID=${EOD_ID:-256}
    PAD_ID=${PAD_ID:-256}
    ;;
  *) # Ling's: <|endoftext|> ends a document and pads, so no label is masked as padding
    VOCAB_SIZE=${VOCAB_SIZE:-157184}
    EOD_ID=${EOD_ID:-156892}
    PAD_ID=${PAD_ID:-156892}
    ;;
esac

# ============================================================================
# 2. Environment: output directory and run name
# ============================================================================
BASE_OUTPUT_DIR=${BASE_OUTPUT_DIR:-${GCS_BUCKET:-runs}}
RUN_NAME=${RUN_NAME:-ling2-pretrain-$(date +%Y%m%d-%H%M)}

# ============================================================================
# 3. JAX on several hosts: the coordinator is the first of TPU_PROCESS_ADDRESSES
# ============================================================================
if [[ -n ${TPU_PROCESS_ADDRESSES:-} ]]; then
  export JAX_COORDINATOR_ADDRESS=${JAX_COORDINATOR_ADDRESS:-${TPU_PROCESS_ADDRESSES%%,*}}
fi
if [[ $BASE_OUTPUT_DIR == gs://* ]]; then # one compilation cache for all hosts
  export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$BASE_OUTPUT_DIR/jax_cache}
fi

# ============================================================================
# 4. Data (Megatron indexed datasets)
# ============================================================================
DATASET_TYPE=${DATASET_TYPE:-mmap}
DATASET_PATH=${DATASET_PATH:-/data/ling2/train}
SPLIT=${SPLIT:-999,1,0}
DATA_SHUFFLE_SEED=${DATA_SHUFFLE_SEED:-42}
EOD_MASK_LOSS=${EOD_MASK_LOSS:-true}
RESET_ATTENTION_MASK=${RESET_ATTENTION_MASK:-false}

# ============================================================================
# 5. Training hyperparameters
# ============================================================================
SEED=${SEED:-42}
STEPS=${STEPS:-100000}
case $MODEL_NAME in
  ling2_tiny)
    MAX_TARGET_LENGTH=${MAX_TARGET_LENGTH:-256}
    ICI_EXPERT_PARALLELISM=${ICI_EXPERT_PARALLELISM:-1}
    EVAL_INTERVAL=${EVAL_INTERVAL:--1}
    ;;
  *)
    MAX_TARGET_LENGTH=${MAX_TARGET_LENGTH:-4096}
    ICI_EXPERT_PARALLELISM=${ICI_EXPERT_PARALLELISM:-8}
    EVAL_INTERVAL=${EVAL_INTERVAL:-1490} # -1 never evaluates
    ;;
esac
PER_DEVICE_BATCH_SIZE=${PER_DEVICE_BATCH_SIZE:-2}
GRADIENT_ACCUMULATION_STEPS=${GRADIENT_ACCUMULATION_STEPS:-1}
CHECKPOINT_PERIOD=${CHECKPOINT_PERIOD:-1000}
EVAL_STEPS=${EVAL_STEPS:-1}

LEARNING_RATE=${LEARNING_RATE:-3.36e-4}
WARMUP_STEPS=${WARMUP_STEPS:-250}
LR_DECAY_STYLE=${LR_DECAY_STYLE:-constant}
ADAM_B1=${ADAM_B1:-0.9}
ADAM_B2=${ADAM_B2:-0.95}
ADAM_EPS=${ADAM_EPS:-1e-8}
ADAM_WEIGHT_DECAY=${ADAM_WEIGHT_DECAY:-0.1}
GRADIENT_CLIPPING_THRESHOLD=${GRADIENT_CLIPPING_THRESHOLD:-1.0}
INITIALIZER_RANGE=${INITIALIZER_RANGE:-0.006}

CALCULATE_PER_TOKEN_LOSS=${CALCULATE_PER_TOKEN_LOSS:-false}
Z_LOSS_MULTIPLIER=${Z_LOSS_MULTIPLIER:-0.0}

# Router bias: no gradient ever reaches it (it is no parameter); it moves by the sign of the load.
ROUTED_BIAS_UPDATE_RATE=${ROUTED_BIAS_UPDATE_RATE:-1e-3}
BIAS_UPDATE=${BIAS_UPDATE:-ling_zero_mean}
LOAD_BALANCE_LOSS_WEIGHT=${LOAD_BALANCE_LOSS_WEIGHT:-0.0}
MOE_Z_LOSS_WEIGHT=${MOE_Z_LOSS_WEIGHT:-3.5e-6}

MTP_LOSS_SCALING_FACTOR=${MTP_LOSS_SCALING_FACTOR:-0.1}
MTP_PER_LAYER_LOSS_NORM=${MTP_PER_LAYER_LOSS_NORM:-true}
MTP_ROLL=${MTP_ROLL:-segment}

# ============================================================================
# 6. Start training
# ============================================================================
settings=(
  model_name="$MODEL_NAME"
  run_name="$RUN_NAME"
  base_output_directory="$BASE_OUTPUT_DIR"
  # tokenizer
  vocab_size="$VOCAB_SIZE"
  eod_id="$EOD_ID"
  pad_id="$PAD_ID"
  # data
  dataset_type="$DATASET_TYPE"
  dataset_path="$DATASET_PATH"
  split="'$SPLIT'"
  data_shuffle_seed="$DATA_SHUFFLE_SEED"
  max_target_length="$MAX_TARGET_LENGTH"
  eod_mask_loss="$EOD_MASK_LOSS"
  reset_attention_mask="$RESET_ATTENTION_MASK"
  # length and batch
  seed="$SEED"
  steps="$STEPS"
  per_device_batch_size="$PER_DEVICE_BATCH_SIZE"
  gradient_accumulation_steps="$GRADIENT_ACCUMULATION_STEPS"
  checkpoint_period="$CHECKPOINT_PERIOD"
  eval_interval="$EVAL_INTERVAL"
  eval_steps="$EVAL_STEPS"
  # devices
  ici_expert_parallelism="$ICI_EXPERT_PARALLELISM"
  # optimizer
  learning_rate="$LEARNING_RATE"
  warmup_steps="$WARMUP_STEPS"
  lr_decay_style="$LR_DECAY_STYLE"
  adam_b1="$ADAM_B1"
  adam_b2="$ADAM_B2"
  adam_eps="$ADAM_EPS"
  adam_weight_decay="$ADAM_WEIGHT_DECAY"
  gradient_clipping_threshold="$GRADIENT_CLIPPING_THRESHOLD"
  initializer_range="$INITIALIZER_RANGE"
  # losses
  calculate_per_token_loss="$CALCULATE_PER_TOKEN_LOSS"
  z_loss_multiplier="$Z_LOSS_MULTIPLIER"
  # mixture of experts
  routed_bias_update_rate="$ROUTED_BIAS_UPDATE_RATE"
  bias_update="$BIAS_UPDATE"
  load_balance_loss_weight="$LOAD_BALANCE_LOSS_WEIGHT"
  moe_z_loss_weight="$MOE_Z_LOSS_WEIGHT"
  # multi-token prediction
  mtp_loss_scaling_factor="$MTP_LOSS_SCALING_FACTOR"
  mtp_per_layer_loss_norm="$MTP_PER_LAYER_LOSS_NORM"
  mtp_roll="$MTP_ROLL"
)
exec python3 -m ling_trainer run "${settings[@]}" "$@"
