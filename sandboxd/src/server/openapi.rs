//! The API's description as an OpenAPI document, served at `/openapi.json`.
//!
//! Routes and their description come from the same place (`utoipa`'s attribute on each handler), so that neither can be without the
//! other. E2B's interface is not part of it: E2B describes that.

use std::collections::BTreeMap;
use std::io;

use axum::body::Bytes;
use utoipa::openapi::path::{Parameter, ParameterBuilder, ParameterIn};
use utoipa::openapi::schema::{ObjectBuilder, Type};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{
    ComponentsBuilder, InfoBuilder, OpenApi, OpenApiBuilder, Ref, RefOr, Required, Response,
    ResponseBuilder,
};
use utoipa::{IntoResponses, PartialSchema as _, ToSchema as _};

use crate::error::ApiError;
use crate::trajectory::REQUEST_ID_BYTES_MAX;

/// What the document begins with.
pub(super) fn head() -> OpenApi {
    let info = InfoBuilder::new()
        .title("sandboxd")
        .description(Some(
            "Sandboxes composed of layers. Errors are `{kind, message}`.",
        ))
        .version(env!("CARGO_PKG_VERSION"));
    let key = HttpBuilder::new().scheme(HttpAuthScheme::Bearer);
    let description = "An API key; a daemon without keys needs none";
    let key = key.description(Some(description)).build();
    let mut schemas = Vec::new();
    ApiError::schemas(&mut schemas);
    let components = ComponentsBuilder::new()
        .security_scheme("key", SecurityScheme::Http(key))
        .schema("ApiError", ApiError::schema())
        .schemas_from_iter(schemas);
    OpenApiBuilder::new()
        .info(info.build())
        .components(Some(components.build()))
        .security(Some([
            SecurityRequirement::default(),
            SecurityRequirement::new("key", std::iter::empty::<String>()),
        ]))
        .build()
}

/// The document as it is sent.
///
/// # Errors
/// Never for documents of ours: they are strings and maps.
pub(super) fn bytes(mut document: OpenApi) -> io::Result<Bytes> {
    for (path, item) in &mut document.paths.paths {
        let changes = [&mut item.post, &mut item.put, &mut item.delete];
        for operation in changes.into_iter().flatten().filter(|_| is_recorded(path)) {
            operation
                .parameters
                .get_or_insert_default()
                .push(RefOr::T(request_id()));
        }
    }
    Ok(serde_json::to_vec(&document)?.into())
}

/// Whether requests that change something under this path take their name from the query (see `recorded`).
fn is_recorded(path: &str) -> bool {
    path.starts_with("/v1/sandboxes/{id}")
        && !path.ends_with("/execs")
        && !path.ends_with("/resize")
}

fn request_id() -> Parameter {
    let text = ObjectBuilder::new()
        .schema_type(Type::String)
        .min_length(Some(1))
        .max_length(Some(REQUEST_ID_BYTES_MAX))
        .pattern(Some("^[^\\u0000-\\u001f\\u007f-\\u009f]+$"));
    let description =
        "The request's name: the same name is never carried out twice, and gets the same answer";
    ParameterBuilder::new()
        .name("request_id")
        .parameter_in(ParameterIn::Query)
        .required(Required::False)
        .description(Some(description))
        .schema(Some(text))
        .build()
}

/// The answers that every request may get.
pub(super) struct Failures;

impl IntoResponses for Failures {
    fn responses() -> BTreeMap<String, RefOr<Response>> {
        let kinds = [
            ("400", "`invalid`: change the request"),
            ("401", "`unauthenticated`: send a key"),
            ("404", "`not_found`"),
            (
                "409",
                "`conflict`: something is there already, or in another state; `unknown_outcome`",
            ),
            ("410", "`sandbox_gone`: make another"),
            (
                "422",
                "`refused`: the sandbox's own files or kernel said no",
            ),
            ("500", "`infra_failed`: mask the result"),
            ("503", "`unavailable`: try again"),
            ("507", "`exhausted`: a limit of the sandbox is reached"),
        ];
        let response = |text: &str| {
            let body = utoipa::openapi::content::ContentBuilder::new()
                .schema(Some(RefOr::Ref(Ref::from_schema_name("ApiError"))))
                .build();
            let response = ResponseBuilder::new().description(text);
            RefOr::T(response.content("application/json", body).build())
        };
        let told = kinds
            .iter()
            .map(|(status, text)| ((*status).to_owned(), response(text)));
        told.collect()
    }
}
