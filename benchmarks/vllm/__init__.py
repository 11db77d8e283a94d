"""What runs in the processes of `vllm_ttft`, `vllm_serving` and `vllm_conversations`."""
