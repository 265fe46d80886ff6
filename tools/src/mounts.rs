//! Placeholder until layerd lands.
use clap::Args;
#[derive(Debug, Args)]
pub(crate) struct MountArgs {}
#[derive(Debug, Args)]
pub(crate) struct UmountArgs {}
#[derive(Debug, Args)]
pub(crate) struct QueryArgs {}
type R = Result<std::process::ExitCode, Box<dyn std::error::Error>>;
pub(crate) fn mount(_: &MountArgs) -> R {
    Err("not there yet".into())
}
pub(crate) fn umount(_: &UmountArgs) -> R {
    Err("not there yet".into())
}
pub(crate) fn stats(_: &QueryArgs) -> R {
    Err("not there yet".into())
}
pub(crate) fn mounts(_: &QueryArgs) -> R {
    Err("not there yet".into())
}
