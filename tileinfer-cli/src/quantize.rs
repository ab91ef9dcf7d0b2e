//! `tileinfer quantize`: a model with its linear weights in int8, as files.

use anyhow::Result;
use tileinfer::weights::quantize_checkpoint;

use crate::args::QuantizeArgs;
use crate::models;
use crate::voice::Voice;

pub(crate) fn quantize(args: &QuantizeArgs) -> Result<()> {
    let voice = Voice::new(args.voice);
    let dir = models::dir_or_pull(&args.name.model, None, args.name.hub, &voice)?;
    let bar = voice.bar("tensors", 0);
    quantize_checkpoint(&dir, &args.out, &mut |done, all| {
        bar.set_length(all as u64);
        bar.set_position(done as u64);
    })?;
    bar.finish_and_clear();
    voice.note(&format!("wrote {}", args.out.display()));
    Ok(())
}
