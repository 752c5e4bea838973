"""Workload in ``transformers`` continuous batching; prints seconds as one line of JSON.

python3 -m benchmarks.gpu.peer REQUESTS PROMPT NEW [--smoke]
"""

import json
import os
import sys
import time


def main() -> None:
    """Run the workload, greedy, with random weights of the same shape and the same prompts."""
    requests, prompt, new = (int(word) for word in sys.argv[1:4])
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers
        from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        print(json.dumps({"not_run": f"transformers cannot be imported: {error}"}))
        return
    import torch

    from benchmarks.gpu.model import LLAMA_3_8B, TOY

    smoke = "--smoke" in sys.argv
    s = TOY if smoke else LLAMA_3_8B
    config = LlamaConfig(
        hidden_size=s.hidden_size,
        num_hidden_layers=s.num_layers,
        num_attention_heads=s.num_heads,
        num_key_value_heads=s.num_kv_heads,
        head_dim=s.head_dim,
        intermediate_size=s.intermediate_size,
        vocab_size=s.vocab_size,
        max_position_embeddings=s.max_context_tokens,
    )
    torch.set_default_dtype(torch.float32 if smoke else torch.bfloat16)
    with torch.device("cpu" if smoke else "cuda"):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    ids = [[(i * 31 + r) % s.vocab_size for i in range(prompt)] for r in range(requests)]
    generation = GenerationConfig(
        max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    seconds = []
    for _ in range(1 if smoke else 2):  # the first run warms up
        began = time.perf_counter()
        with torch.no_grad():  # its worker thread cannot use tensors of inference mode
            outputs = model.generate_batch(ids, generation_config=generation)
        if not smoke:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        counts = [len(output.generated_tokens) for output in outputs.values()]
        if counts != [new] * requests:
            print(json.dumps({"not_run": f"got {sum(counts)} tokens instead of {requests * new}"}))
            return
    print(json.dumps({"s": seconds[-1], "transformers": transformers.__version__}))


if __name__ == "__main__":
    main()
