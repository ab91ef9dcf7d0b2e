//! The flags that say how tokens are chosen.

use clap::Args;

/// How tokens are chosen. What is not given comes from the model's generation_config.json.
#[derive(Debug, Args)]
pub(crate) struct SamplingArgs {
    /// 0 always takes the likeliest token
    #[arg(
        long,
        visible_alias = "temp",
        value_name = "T",
        allow_negative_numbers = true
    )]
    pub(crate) temperature: Option<f32>,
    /// Choose among the K likeliest tokens (0: all)
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    pub(crate) top_k: Option<u32>,
    /// Choose among the likeliest tokens that together have probability P
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(crate) top_p: Option<f32>,
    /// Choose among tokens at least P times as likely as the likeliest
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(crate) min_p: Option<f32>,
    /// Divide the logits of tokens that occurred (1: off)
    #[arg(long, value_name = "R", allow_negative_numbers = true)]
    pub(crate) repetition_penalty: Option<f32>,
    /// Subtract from the logits of tokens that were generated
    #[arg(long, value_name = "A", allow_negative_numbers = true)]
    pub(crate) presence_penalty: Option<f32>,
    /// Subtract from the logits of tokens once for each time they were generated
    #[arg(long, value_name = "A", allow_negative_numbers = true)]
    pub(crate) frequency_penalty: Option<f32>,
    /// Add to the logits of tokens: ID=B,ID=B
    #[arg(long, value_name = "ID=B,...", value_delimiter = ',', value_parser = parse_bias, allow_hyphen_values = true)]
    pub(crate) logit_bias: Vec<(u32, f32)>,
    /// Seed of the noise (default: a random one, printed)
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) seed: Option<u64>,
}

fn parse_bias(text: &str) -> Result<(u32, f32), String> {
    let (id, bias) = text
        .split_once('=')
        .ok_or("write ID=BIAS, such as 42=-1.5")?;
    let id = id
        .trim()
        .parse()
        .map_err(|_| format!("'{id}' is not a token id"))?;
    let bias = bias
        .trim()
        .parse()
        .map_err(|_| format!("'{bias}' is not a number"))?;
    Ok((id, bias))
}
