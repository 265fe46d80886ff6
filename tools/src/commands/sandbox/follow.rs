//! An exec's stream of frames: output to our own, its end as our exit status.

use std::io::Write as _;
use std::process::ExitCode;

use http_body_util::BodyExt as _;
use hyper::Response;
use hyper::body::Incoming;
use serde_json::Value;

use crate::commands::Failure;
use crate::output;

/// Most bytes of one frame.
const FRAME_BYTES_MAX: usize = 1 << 20;

/// What a frame says.
enum Told {
    /// More follows.
    More,
    /// The end.
    End(Value),
}

/// Passes output on until the exec ends.
///
/// # Errors
/// When the stream breaks off or makes no sense.
pub(crate) async fn follow(response: Response<Incoming>) -> Result<Value, Failure> {
    let mut body = response.into_body();
    let mut input: Vec<u8> = Vec::new();
    while let Some(frame) = body.frame().await {
        if let Ok(data) = frame?.into_data() {
            input.extend_from_slice(&data);
        }
        while let Some((kind, payload)) = take(&mut input)? {
            if let Told::End(exit) = tell(kind, &payload)? {
                return Ok(exit);
            }
        }
    }
    Err("the stream broke off: what became of the command is not known (`dsec sandbox logs` asks again)".into())
}

fn take(input: &mut Vec<u8>) -> Result<Option<(u8, Vec<u8>)>, Failure> {
    let Some((head, _)) = input.split_first_chunk::<4>() else {
        return Ok(None);
    };
    let len = usize::try_from(u32::from_le_bytes(*head))?;
    if len == 0 || len > FRAME_BYTES_MAX {
        return Err(format!("sandboxd sent a frame of {len} bytes").into());
    }
    if input.len() < 4 + len {
        return Ok(None);
    }
    let rest = input.split_off(4 + len);
    let whole = std::mem::replace(input, rest);
    let kind = whole.get(4).copied().unwrap_or_default();
    Ok(Some((kind, whole.get(5..).unwrap_or_default().to_vec())))
}

fn tell(kind: u8, payload: &[u8]) -> Result<Told, Failure> {
    let bytes = payload.get(8..).unwrap_or_default();
    match kind {
        b'1' => {
            let mut stdout = std::io::stdout().lock();
            stdout.write_all(bytes)?;
            stdout.flush()?;
        }
        b'2' => std::io::stderr().lock().write_all(bytes)?,
        b'X' => return Ok(Told::End(serde_json::from_slice(payload)?)),
        _ => {}
    }
    Ok(Told::More)
}

/// The exit status that stands for an exec's end: its own, 124 for a time-out, 125 for what is not its fault.
pub(crate) fn status(exit: &Value) -> ExitCode {
    let text = |name: &str| exit.get(name).and_then(Value::as_str).unwrap_or_default();
    let outcome = text("outcome");
    let code = exit.get("exit_code").and_then(Value::as_i64).unwrap_or(125);
    let own = u8::try_from(code).unwrap_or(125);
    match outcome {
        "user_exit" | "signal" => ExitCode::from(own),
        "timed_out" => {
            output::note("dsec: its time was over; everything that it started was killed");
            ExitCode::from(124)
        }
        "oom" => {
            output::note("dsec: killed for lack of memory (`--memory-mb`)");
            ExitCode::from(own)
        }
        "not_started" => {
            output::note(&format!("dsec: {}", text("message")));
            ExitCode::from(own)
        }
        other => {
            output::note(&format!("dsec: {other}: {}", text("message")));
            ExitCode::from(125)
        }
    }
}
