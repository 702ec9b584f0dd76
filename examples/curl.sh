#!/bin/sh
# Trains and samples with nothing but curl. Needs TINKER_BASE_URL and TINKER_API_KEY.
set -eu

STEPS=20
URL="$TINKER_BASE_URL/api/v1"

# post CALL < BODY: send a JSON body; print the response. An error ends the script.
post() {
  curl -sS --fail-with-body -H "X-API-Key: $TINKER_API_KEY" "$URL/$1" -d @-
}

# field NAME < JSON: print a text or number, the last one of that name.
field() {
  sed -n "s/.*\"$1\": *\"\{0,1\}\([^\",}]*\).*/\1/p"
}

# result < PROMISE: wait for the result of a request and print it.
result() {
  request=$(field request_id)
  answer=$(curl -sS --fail --retry 100 --retry-delay 1 -H "X-API-Key: $TINKER_API_KEY" \
    "$URL/retrieve_future" -d "{\"request_id\": \"$request\"}" 2>/dev/null)
  case $answer in
    '{"error":'*) echo "$answer" >&2 && exit 1 ;;
    *) echo "$answer" ;;
  esac
}

base=$(curl -sS --fail-with-body -H "X-API-Key: $TINKER_API_KEY" "$URL/get_server_capabilities" | field model_name)
echo "base model: $base"
model=$(post create_model <<END | result | field model_id
{"model_name": "$base", "lora_config": {"rank": 8, "seed": 1}}
END
)
echo "model:      $model"

# The model learns a sequence of token ids. Tokenizing text needs a program: see get_tokenizer.
for step in $(seq $STEPS); do
  batch=$(post forward_backward <<END
{
  "model_id": "$model",
  "loss_fn": "cross_entropy",
  "data": [
    {
      "model_input": {"tokens": [40, 50, 45, 60, 42, 55]},
      "loss_fn_inputs": {"target_tokens": [50, 45, 60, 42, 55, 41]}
    }
  ]
}
END
)
  post optim_step <<END | result >/dev/null
{"model_id": "$model", "adam_params": {"learning_rate": 0.003}}
END
  echo "step $step:     loss $(echo "$batch" | result | field loss:sum)"
done

tokens=$(post sample <<END | sed -n 's/.*"tokens": *\[\([^]]*\)\].*/\1/p'
{
  "model_id": "$model",
  "prompt": {"tokens": [40, 50, 45]},
  "sampling_params": {"max_tokens": 3, "temperature": 0}
}
END
)
echo "after 40, 50, 45: $tokens"
post delete_model <<END >/dev/null
{"model_id": "$model"}
END
