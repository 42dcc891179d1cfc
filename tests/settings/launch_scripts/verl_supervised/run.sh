# The supervised trainer of verl with its groups of Hydra in words that stand in one variable.
ENTRY="-m verl.trainer.sft_trainer"
ENGINE="engine=megatron optim=megatron optim.lr=2e-5 optim.lr_warmup_steps=10 optim.betas='[0.9,0.95]'"
torchrun --standalone --nproc_per_node=4 $ENTRY \
  data.train_files=/data/a.parquet data.messages_key=talks data.train_batch_size=32 data.max_length=4096 \
  data.use_dynamic_bsz=true data.max_token_len_per_gpu=8192 model.path=/models/a model.lora_rank=8 \
  model.exclude_modules='.*visual.*' trainer.total_epochs=2 trainer.logger='["console","wandb"]' $ENGINE
