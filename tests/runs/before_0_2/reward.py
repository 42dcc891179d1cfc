def reward(sample):
    answer = sample.tokens[len(sample.tokens) - sample.response_length :]
    return sum(token < 64 for token in answer) / len(answer)
