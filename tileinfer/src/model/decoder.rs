//! The forward pass. It knows the order of the ops, not what they run on nor which family a model is of.

use super::load::DecoderLM;
use super::workspace::Workspace;
use crate::Result;
use crate::backend::{Backend, QkNorms};

/// Runs the rows that `ws.step` and `ws.stream` were prepared for through the model: writes their keys and
/// values into `pages` (one per layer) and leaves in `ws`
///
/// - `stream`: the residual stream after the last layer, `[rows, hidden]`,
/// - `taps`: the residual streams that were asked for, side by side, `[rows, taps * hidden]`,
/// - `hidden`: the wanted rows after the final norm, `[wanted, hidden]`,
/// - `logits`: f32 `[wanted, head rows]`.
///
/// Pre-norm decoder as in transformers: `x += attention(norm(x)); x += mlp(norm(x))`, then
/// `logits = head(norm(x))`.
pub fn forward<B: Backend>(
    backend: &B,
    model: &DecoderLM<B>,
    pages: &mut [B::Pages],
    ws: &mut Workspace<B>,
) -> Result<()> {
    let eps = model.eps;
    let mut norm = &model.layers[0].attention_norm;
    ws.tap(backend, 0)?;
    backend.rms_norm(&mut ws.normed, &ws.stream, norm, eps)?;

    for (i, layer) in model.layers.iter().enumerate() {
        let norms = QkNorms {
            query: layer.query_norm.as_ref(),
            key: layer.key_norm.as_ref(),
            eps,
        };
        let rope = layer.rotates.then_some(&model.rope);
        let projection = (&layer.qkv.weight, layer.qkv.bias.as_ref());
        let (q, heads, step, shape) = (&mut ws.queries, &mut ws.heads, &ws.step, &layer.attention);
        backend.linear_qk_norm_rope_store(
            q,
            &mut pages[i],
            heads,
            &mut ws.qkv,
            projection,
            &ws.normed,
            norms,
            rope,
            step,
            shape,
        )?;
        backend.attention(&mut ws.attended, &ws.queries, &pages[i], step, shape)?;

        let (stream, normed, delta) = (&mut ws.stream, &mut ws.normed, &mut ws.delta);
        let output = (&layer.output.weight, layer.output.bias.as_ref());
        norm = &layer.mlp_norm;
        backend.linear_add_rms_norm(stream, normed, delta, output, &ws.attended, norm, eps)?;

        let up = &layer.up;
        let (active, wide) = (&mut ws.active, &mut ws.wide);
        backend.linear_activation(
            active,
            wide,
            &up.weight,
            up.bias.as_ref(),
            &ws.normed,
            &layer.activation,
        )?;
        let (stream, normed, delta) = (&mut ws.stream, &mut ws.normed, &mut ws.delta);
        let down = (&layer.down.weight, layer.down.bias.as_ref());
        norm = model
            .layers
            .get(i + 1)
            .map_or(&model.final_norm, |next| &next.attention_norm);
        backend.linear_add_rms_norm(stream, normed, delta, down, &ws.active, norm, eps)?;
        ws.tap(backend, i + 1)?;
    }

    if ws.wants_rows() {
        backend.gather_wanted(&mut ws.hidden, &ws.normed, &ws.step)?;
        backend.linear(&mut ws.logits, &model.head, None, &ws.hidden)?;
    }
    Ok(())
}
