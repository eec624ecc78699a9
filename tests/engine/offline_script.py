"""A script in the shape of vLLM's offline examples; test_offline_script.py runs it with another first import."""

from vllm import LLM, SamplingParams

prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8, seed=7, n=2, stop=["\n\n"])


def main():
    llm = LLM(model="shape:tiny", device="cpu", tensor_parallel_size=1, trust_remote_code=True, max_model_len=512)
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        prompt = output.prompt
        assert len(output.outputs) == 2
        generated_text = output.outputs[0].text
        assert output.outputs[1].index == 1
        assert output.finished
        print(f"Prompt: {prompt!r}, {len(output.prompt_token_ids)} tokens, Generated text: {generated_text!r}")
        print(f"Reason: {output.outputs[0].finish_reason}, {len(output.outputs[0].token_ids)} tokens")
    three = SamplingParams(max_tokens=3)
    outputs = llm.generate({"prompt_token_ids": [1, 2, 3]}, sampling_params=three, use_tqdm=False)
    print(f"Ids: {outputs[0].prompt} {len(outputs[0].outputs[0].token_ids)}")
    conversation = [{"role": "user", "content": "Write an essay."}]
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    greedy = SamplingParams(temperature=0, max_tokens=4)
    outputs = llm.chat([conversation, conversation], greedy, chat_template=template)
    print(f"Chat: {outputs[1].prompt!r} {outputs[0].outputs[0].text == outputs[1].outputs[0].text}")


if __name__ == "__main__":
    main()
