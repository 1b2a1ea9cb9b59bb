"""Commands of TensorRT-LLM's documents (lookahead, prompt lookup, speculative sampling), word for
word, and which program each is here."""

from __future__ import annotations

PROGRAMS = {
    "python3 examples/models/core/llama/convert_checkpoint.py": "specdec convert",
    "python3 convert_checkpoint.py": "specdec convert",
    "trtllm-build": "specdec build",
    "python3 examples/run.py": "specdec run",
    "python examples/run.py": "specdec run",
    "python examples/summarize.py": "specdec summarize",
    "python3 examples/pytorch/quickstart_advanced.py": "python examples/quickstart_advanced.py",
}

COMMANDS = {
    "lookahead: convert": r"""
python3 examples/models/core/llama/convert_checkpoint.py    \
    --model_dir=$MODEL_DIR                      \
    --output_dir=$CKPT_DIR                      \
    --dtype=float16                             \
    --tp_size=1                                 \
    --pp_size=1
""",
    "lookahead: build": r"""
trtllm-build                        \
    --checkpoint_dir=$CKPT_DIR      \
    --output_dir=$ENGINE_DIR        \
    --gpt_attention_plugin=float16  \
    --gemm_plugin=float16           \
    --max_batch_size=32             \
    --max_input_len=1024            \
    --max_seq_len=2048              \
    --max_beam_width=1              \
    --log_level=error               \
    --max_draft_len=83              \
    --speculative_decoding_mode=lookahead_decoding
""",
    "lookahead: run": r"""
python examples/run.py          \
    --tokenizer_dir=$MODEL_DIR  \
    --engine_dir=$ENGINE_DIR    \
    --max_output_len=32         \
    --lookahead_config=[7,7,7]  \
    --log_level=verbose         \
    --input_text 'Once upon' 'To be, or not' 'Be not afraid of greatness'
""",
    "lookahead: summarize": r"""
python examples/summarize.py    \
    --test_hf                   \
    --test_trt_llm              \
    --hf_model_dir=$MODEL_DIR   \
    --engine_dir=$ENGINE_DIR    \
    --data_type=fp16            \
    --lookahead_config=[7,7,7]
""",
    "prompt lookup: convert": r"""
python3 examples/models/core/llama/convert_checkpoint.py \
    --model_dir=<Path To Llama-v2-13B repo> \
    --output_dir=./ckpt-target \
    --dtype=float16
""",
    "prompt lookup: build": r"""
trtllm-build \
    --checkpoint_dir=./ckpt-target \
    --output_dir=./target-engine \
    --gemm_plugin=float16 \
    --use_paged_context_fmha=enable \
    --speculative_decoding_mode=draft_tokens_external \
    --max_draft_len=10 \
    --max_batch_size=4 \
    --max_input_len=3200 \
    --max_seq_len=4800
""",
    "prompt lookup: run": r"""
python3 examples/run.py \
    --tokenizer_dir <Path To Llama-v2-7B repo> \
    --engine_dir ./target-engine \
    --prompt_lookup_config="[10,2,[0]]" \
    --max_output_len=256 \
    --kv_cache_enable_block_reuse \
    --input_text="How does Draft-Sampling work?"
""",
    "prompt lookup: summarize": r"""
python examples/summarize.py \
    --test_hf \
    --test_trt_llm \
    --check_accuracy \
    --hf_model_dir <Path To Llama-v2-7B repo> \
    --engine_dir ./target-engine \
    --batch_size=1 \
    --prompt_lookup_config="[10,2,[0]]" \
    --kv_cache_enable_block_reuse
""",
    "prompt lookup: V2": r"""
python3 examples/pytorch/quickstart_advanced.py \
    --max_matching_ngram_size=2 \
    --spec_decode_nextn=4
""",
    "draft model: common": 'export COMMON_COMMAND="--max_batch_size=1 --max_input_len=2048 '
    "--max_seq_len=3072 --gpt_attention_plugin=float16 --gemm_plugin=float16 "
    "--remove_input_padding=enable --paged_kv_cache=enable --context_fmha=enable "
    '--use_paged_context_fmha=enable --gather_generation_logits"',
    "draft model: target": 'export TARGET_COMMAND_FP16="$DRAFT_COMMAND_FP16 '
    '--max_draft_len=$MAX_DRAFT_LENGTH --speculative_decoding_mode draft_tokens_external"',
    "draft model: convert the draft": "python3 convert_checkpoint.py "
    "--model_dir=$DRAFT_MODEL_PATH --output_dir=ckpt/$DRAFT_NAME --tp_size=1",
    "draft model: convert the target": "python3 convert_checkpoint.py "
    "--model_dir=$TARGET_MODEL_PATH --output_dir=ckpt/$TARGET_NAME --tp_size=1",
    "draft model: build the draft": "trtllm-build --checkpoint_dir=ckpt/$DRAFT_NAME "
    "--output_dir=engine/draft/$DRAFT_NAME $DRAFT_COMMAND_FP16",
    "draft model: build the target": "trtllm-build --checkpoint_dir=ckpt/$TARGET_NAME "
    "--output_dir=engine/target/$TARGET_NAME $TARGET_COMMAND_FP16",
    "draft model: FP8": 'export DRAFT_COMMAND_FP8="$COMMON_COMMAND --use_fp8_context_fmha=enable"',
    "draft model: build the draft, FP8": "trtllm-build --checkpoint_dir=ckpt/$DRAFT_NAME "
    "--output_dir=engine/draft/$DRAFT_NAME $DRAFT_COMMAND_FP8",
    "draft model: build the target, FP8": "trtllm-build --checkpoint_dir=ckpt/$TARGET_NAME "
    "--output_dir=engine/target/$TARGET_NAME $TARGET_COMMAND_FP8",
}
