"""A script in the shape of vLLM's offline examples; test_offline_script.py runs it with another package's name."""

import json

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.inputs import TextPrompt
from vllm.outputs import RequestOutput
from vllm.sampling_params import BeamSearchParams, GuidedDecodingParams, StructuredOutputsParams

prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8, seed=7, n=2, stop=["\n\n"])
OPEN = {
    "type": "object",
    "properties": {"seats": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["seats"],
}
SCHEMA = {**OPEN, "additionalProperties": False}


def plain(llm):
    outputs = llm.generate(prompts, sampling_params)
    for output in outputs:
        prompt = output.prompt
        assert isinstance(output, RequestOutput)
        assert len(output.outputs) == 2
        generated_text = output.outputs[0].text
        assert output.outputs[1].index == 1
        assert output.finished
        print(f"Prompt: {prompt!r}, {len(output.prompt_token_ids)} tokens, Generated text: {generated_text!r}")
        print(f"Reason: {output.outputs[0].finish_reason}, {len(output.outputs[0].token_ids)} tokens")
    three = SamplingParams(max_tokens=3)
    outputs = llm.generate({"prompt_token_ids": [1, 2, 3]}, sampling_params=three, use_tqdm=False)
    print(f"Ids: {outputs[0].prompt} {len(outputs[0].outputs[0].token_ids)}")
    given = [TokensPrompt(prompt_token_ids=[1, 2, 3]), TextPrompt(prompt="a")]
    outputs = llm.generate(given, [three, SamplingParams(max_tokens=4)], priority=[0, 0])
    print(f"Mixed: {[len(output.outputs[0].token_ids) for output in outputs]}")


def logprobs(llm):
    params = SamplingParams(temperature=0.0, max_tokens=2, logprobs=2, prompt_logprobs=1)
    [output] = llm.generate(["ab"], params)
    [completion] = output.outputs
    total = 0.0
    for at, token_id in enumerate(completion.token_ids):
        position = completion.logprobs[at]
        chosen = position[token_id]
        assert next(iter(position)) == token_id
        assert (chosen.rank, len(position)) == (1, 2)
        assert chosen.decoded_token is not None
        total += chosen.logprob
    assert abs(total - completion.cumulative_logprob) < 1e-6
    assert output.prompt_logprobs[0] is None
    assert output.prompt_token_ids[1] in output.prompt_logprobs[1]
    print(f"Logprobs: {len(output.prompt_logprobs)} {len(output.prompt_token_ids + completion.token_ids)}")


def structured(llm):
    for params in (
        SamplingParams(
            max_tokens=60, structured_outputs=StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
        ),
        SamplingParams(
            max_tokens=60, guided_decoding=GuidedDecodingParams(json=json.dumps(SCHEMA), whitespace_pattern="")
        ),
        SamplingParams(structured_outputs=StructuredOutputsParams(json=OPEN, disable_additional_properties=True)),
    ):
        params.max_tokens = 200
        text = llm.generate("A car: ", params)[0].outputs[0].text
        print(f"JSON: {1 <= json.loads(text)['seats'] <= 9}")
    choice = StructuredOutputsParams(choice=["Positive", "Negative"])
    text = llm.generate("So?", sampling_params=SamplingParams(structured_outputs=choice))[0].outputs[0].text
    print(f"Choice: {text in ('Positive', 'Negative')}")
    regex = StructuredOutputsParams(regex=r"[a-c]{3}@x\.com\n")
    text = llm.generate("So?", SamplingParams(structured_outputs=regex, stop=["\n"], max_tokens=20))[0].outputs[0].text
    print(f"Regex: {len(text)} {text.endswith('@x.com')}")
    grammar = StructuredOutputsParams(grammar='root ::= "SELECT " column\ncolumn ::= "a" | "b"')
    text = llm.generate("So?", SamplingParams(structured_outputs=grammar, max_tokens=20))[0].outputs[0].text
    print(f"Grammar: {text in ('SELECT a', 'SELECT b')}")


def chat(llm):
    conversation = [{"role": "user", "content": [{"type": "text", "text": "Write an essay."}]}]
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    greedy = SamplingParams(temperature=0, max_tokens=4)
    outputs = llm.chat([conversation, conversation], greedy, chat_template=template)
    print(f"Chat: {outputs[1].prompt!r} {outputs[0].outputs[0].text == outputs[1].outputs[0].text}")
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(conversation, chat_template=template, tokenize=False)
    print(f"Template: {text == outputs[0].prompt} {tokenizer.decode(tokenizer.encode(text)) == text}")


def beams(llm):
    outputs = llm.beam_search([{"prompt": "ab"}], BeamSearchParams(beam_width=3, max_tokens=4))
    sequences = outputs[0].sequences
    scores = [sequence.cum_logprob for sequence in sequences]
    print(f"Beams: {len(sequences)} {scores == sorted(scores, reverse=True)} {sequences[0].text.startswith('ab')}")


def main():
    llm = LLM(model="shape:tiny", device="cpu", tensor_parallel_size=1, trust_remote_code=True, max_model_len=512)
    for part in (plain, logprobs, structured, beams, chat):
        part(llm)


if __name__ == "__main__":
    main()
